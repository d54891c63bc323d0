"""The OpenAPI page: what each endpoint takes and answers, with examples."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from shoal.client.openai.embeddings import EmbeddingsBody
from shoal.client.openai.request_models import ChatBody, CompletionBody, RequestBody
from shoal.client.openai.responses_input import ResponsesBody
from shoal.client.openai.text_endpoints import DetokenizeBody, TokenizeBody

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {}


def optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def record(required: dict[str, Schema], **more: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **more},
        "required": list(required),
        "additionalProperties": False,
    }


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


USAGE = record(
    {
        "prompt_tokens": WHOLE,
        "completion_tokens": WHOLE,
        "total_tokens": WHOLE,
        "prompt_tokens_details": record({"cached_tokens": WHOLE}),
    }
)
FINISH_REASON = one_of("stop", "length", "tool_calls")
TOOL_CALL = record(
    {
        "id": TEXT,
        "type": one_of("function"),
        "function": record({"name": TEXT, "arguments": TEXT}),
    }
)
MESSAGE = record(
    {"role": one_of("assistant"), "content": optional(TEXT), "refusal": optional(TEXT)},
    tool_calls=array(TOOL_CALL),
    reasoning_content=TEXT,
)
MODEL = record(
    {
        "id": TEXT,
        "object": one_of("model"),
        "created": WHOLE,
        "owned_by": TEXT,
        "max_model_len": optional(WHOLE),
        "ready": FLAG,
    }
)


def completion(kind: str, choice: dict[str, Schema]) -> Schema:
    choice = {"index": WHOLE, "finish_reason": FINISH_REASON, "logprobs": ANY, **choice}
    return record(
        {
            "id": TEXT,
            "object": one_of(kind),
            "created": WHOLE,
            "model": TEXT,
            "choices": array(record(choice)),
            "usage": USAGE,
        }
    )


ERROR = record(
    {
        "error": record(
            {
                "message": TEXT,
                "type": TEXT,
                "param": optional(TEXT),
                "code": optional(TEXT),
            }
        )
    }
)
ANSWERS: dict[str, Schema] = {
    "Error": ERROR,
    "Chat": completion("chat.completion", {"message": MESSAGE}),
    "Completion": completion("text_completion", {"text": TEXT}),
    "Embeddings": record(
        {
            "object": one_of("list"),
            "model": TEXT,
            "data": array(
                record(
                    {
                        "object": one_of("embedding"),
                        "index": WHOLE,
                        "embedding": {"anyOf": [TEXT, array({"type": "number"})]},
                    }
                )
            ),
            "usage": record({"prompt_tokens": WHOLE, "total_tokens": WHOLE}),
        }
    ),
    "Response": {
        "type": "object",
        "properties": {
            "id": TEXT,
            "object": one_of("response"),
            "created_at": WHOLE,
            "model": TEXT,
            "status": one_of("completed", "incomplete"),
            "output": array({"type": "object"}),
            "usage": {"type": "object"},
        },
        "required": ["id", "object", "created_at", "model", "status", "output", "usage"],
    },
    "DeletedResponse": record({"id": TEXT, "object": one_of("response"), "deleted": FLAG}),
    "Tokens": record(
        {
            "count": WHOLE,
            "max_model_len": WHOLE,
            "tokens": array(WHOLE),
            "token_strs": optional(array(TEXT)),
        }
    ),
    "Text": record({"prompt": TEXT}),
    "Model": MODEL,
    "Models": record({"object": one_of("list"), "data": array(MODEL)}),
    "State": {"type": "object"},
    "Version": record({"version": TEXT}),
}

_HELLO = [{"role": "user", "content": "Hello!"}]
# path: summary, body, an example of it without the model, answer
POSTS: dict[str, tuple[str, type[RequestBody], Schema, str]] = {
    "/v1/chat/completions": (
        "Answer a chat",
        ChatBody,
        {"messages": _HELLO, "max_completion_tokens": 16},
        "Chat",
    ),
    "/v1/completions": (
        "Go on with a text",
        CompletionBody,
        {"prompt": "Once upon a time", "max_tokens": 16},
        "Completion",
    ),
    "/v1/responses": (
        "Answer, and remember the turn",
        ResponsesBody,
        {"input": "Hello!", "max_output_tokens": 16},
        "Response",
    ),
    "/v1/embeddings": (
        "Embed texts",
        EmbeddingsBody,
        {"input": ["a text", "another"], "encoding_format": "float"},
        "Embeddings",
    ),
    "/tokenize": ("Text or a chat as token ids", TokenizeBody, {"prompt": "Hello!"}, "Tokens"),
    "/detokenize": ("Token ids as text", DetokenizeBody, {"tokens": [1, 2, 3]}, "Text"),
}
GETS = {
    "/v1/models": ("List models and versions", "Models"),
    "/v1/models/{model_id}": ("One model, or one version of it (name@2)", "Model"),
    "/v1/responses/{response_id}": ("A stored response", "Response"),
    "/health": ("What the models say of themselves", "State"),
    "/health/live": ("Whether this process answers", "State"),
    "/health/ready": ("Whether a model can be asked", "State"),
    "/version": ("The server's version", "Version"),
}
EVENT: Schema = {
    "type": "object",
    "properties": {"event": TEXT, "data": TEXT},
    "required": ["data"],
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def describe(app: FastAPI, example_model: str = "smollm2-135m-instruct") -> Schema:
    """The page of the application's routes; made once and kept by it."""
    if app.openapi_schema is None:
        app.openapi_schema = _describe(app, example_model)
    return app.openapi_schema


def _describe(app: FastAPI, example_model: str) -> Schema:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = dict(ANSWERS)
    paths: Schema = {path.replace(":path}", "}"): item for path, item in document["paths"].items()}
    for path, (summary, body, example, answer) in POSTS.items():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = {**schema, "additionalProperties": False}
        operation = paths[path]["post"]
        operation["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _ref(body.__name__),
                    "example": {"model": example_model, **example},
                }
            },
        }
        _answers(operation, summary, answer, is_streamed=path in STREAMED)
    for path, (summary, answer) in GETS.items():
        _answers(paths[path]["get"], summary, answer)
    (model_id,) = paths["/v1/models/{model_id}"]["get"]["parameters"]
    model_id["example"] = example_model
    stored = paths["/v1/responses/{response_id}"]
    _answers(stored["delete"], "Forget a stored response", "DeletedResponse")
    paths["/v1/responses"]["post"]["responses"]["200"]["links"] = {
        name: {
            "operationId": stored[method]["operationId"],
            "parameters": {"response_id": "$response.body#/id"},
        }
        for name, method in (("read", "get"), ("forget", "delete"))
    }
    document["paths"] = paths
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    # Whether a key is needed is up to who runs the server.
    document["security"] = [{}, {"key": []}]
    return document


def _answers(operation: Schema, summary: str, answer: str, is_streamed: bool = False) -> None:
    content: Schema = {"application/json": {"schema": _ref(answer)}}
    if is_streamed:
        content["text/event-stream"] = {"schema": EVENT}
    operation["summary"] = summary
    operation["responses"] = {
        "200": {"description": "The answer", "content": content},
        "default": {
            "description": "Why there is none",
            "content": {"application/json": {"schema": _ref("Error")}},
        },
    }
    if answer == "State":  # a server that is not ready says why in the same form
        operation["responses"]["503"] = {"description": "Not ready", "content": content}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
