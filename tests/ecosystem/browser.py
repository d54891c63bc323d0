"""The TypeScript SDK in a real browser: what `npm run build` makes, imported by a page as it is."""

import json
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import typescript_sdk
from served import MODEL, Served

TIMEOUT_S = 90
PAGE = """<!doctype html><meta charset="utf-8"><script type="module">
const say = (what) => fetch("/result", { method: "POST", body: JSON.stringify(what) });
try {
  const { Client, ShoalError } = await import("./dist/index.js");
  const { url, apiKey, model } = await (await fetch("/settings.json")).json();
  const client = new Client(url, { model, apiKey });
  const question = [{ role: "user", content: "What is the capital of France?" }];
  const sampling = { max_tokens: 24, temperature: 0 };
  const answer = await client.generate(question, sampling);
  let streamed = "";
  let pieces = 0;
  for await (const delta of client.stream(question, sampling)) {
    streamed += delta.text;
    pieces += 1;
  }
  let error = null;
  try {
    await client.generate(question, { temperature: 9 });
  } catch (caught) {
    error = caught instanceof ShoalError ? { status: caught.status, param: caught.param } : "other";
  }
  for await (const delta of client.stream(question, { max_tokens: 400 })) break;
  const ready = await client.ready();
  await say({ text: answer.text, streamed, pieces, error, ready, models: await client.models() });
} catch (failure) {
  await say({ failure: String(failure && failure.stack || failure) });
}
</script>"""


class Pages:
    """A site of one page; what the page reports back is in ``results``."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.results: queue.Queue[dict] = queue.Queue()
        results = self.results

        class Handler(SimpleHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                results.put(json.loads(body))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        handler = partial(Handler, directory=str(folder))
        self.server = ThreadingHTTPServer(("127.0.0.1", port), handler)


def origin(port: int) -> str:
    """Of pages on this port."""
    return f"http://127.0.0.1:{port}"


@contextmanager
def pages(port: int) -> Iterator[Pages]:
    with tempfile.TemporaryDirectory(prefix="shoal-pages-") as folder:
        site = Pages(Path(folder), port)
        thread = threading.Thread(target=site.server.serve_forever, daemon=True)
        thread.start()
        try:
            yield site
        finally:
            site.server.shutdown()
            site.server.server_close()


def missing() -> str:
    """Why there can be no check here; empty when there can."""
    if shutil.which("chromium") is None:
        return "there is no chromium (on Debian: apt-get install chromium)"
    return typescript_sdk.missing()


def suite(served: Served, environment: dict[str, str]) -> int:
    """The exit code. The server allows the origin of this port."""
    if reason := missing():
        print(f"The TypeScript SDK is not checked in a browser: {reason}")
        return 0
    port = int(environment["SHOAL_CHECK_PAGES_PORT"])
    with pages(port) as site:
        tsc = "node_modules/.bin/tsc"
        typescript_sdk.run(tsc, "-p", "tsconfig.json", "--outDir", str(site.folder / "dist"))
        (site.folder / "index.html").write_text(PAGE)
        key = environment["SHOAL_CHECK_KEY"]
        settings = {"url": served.openai_url, "model": MODEL, "apiKey": key}
        (site.folder / "settings.json").write_text(json.dumps(settings))
        result = report_of(site, f"{origin(port)}/index.html")
    print(json.dumps(result))
    is_right = (
        "Paris" in result.get("text", "")
        and result["streamed"] == result["text"]
        and result["pieces"] > 3
        and result["error"] == {"status": 400, "param": "temperature"}
        and result["ready"]
        and MODEL in [entry["name"] for entry in result["models"]]
    )
    return 0 if is_right else 1


def report_of(site: Pages, url: str) -> dict:
    """What the page said after a browser had opened it."""
    with tempfile.TemporaryDirectory(prefix="shoal-chromium-") as profile:
        command = [
            "chromium",
            "--headless",
            "--no-sandbox",  # CI runs as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",  # stay after the page has loaded
            url,
        ]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return site.results.get(timeout=TIMEOUT_S)
        except queue.Empty:
            return {"failure": f"the page reported nothing in {TIMEOUT_S} s"}
        finally:
            browser.terminate()
            browser.wait(20)
