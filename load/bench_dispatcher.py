"""What the dispatcher costs a request, under each policy: ``python load/bench_dispatcher.py``."""

import random
import time

from shoal.scheduler.dispatched import Add
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.outputs import SampledToken, StepOutput
from shoal.scheduler.policies import POLICY_NAMES
from shoal.scheduler.preemption import PreemptionConfig
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import FinishReason
from shoal.scheduler.tiers import Tier, TierTable
from shoal.scheduler.worker_ledger import WorkerCapacity

NUM_REQUESTS = 20_000
NUM_QUEUED = 2_000
NUM_OUTPUTS = 16
NUM_TENANTS = 200
TIERS = TierTable([Tier("high", 8.0), Tier("standard", 2.0), Tier("low", 1.0)])


def measure(policy: str) -> tuple[float, float]:
    """Microseconds a request, add to finish without its tokens, and a token."""
    rng = random.Random(0)
    config = DispatcherConfig(
        NUM_REQUESTS, policy=policy, tiers=TIERS, preemption=PreemptionConfig(2)
    )
    dispatcher = Dispatcher(config)
    dispatcher.worker_ready(0, WorkerCapacity(10_000, 16, 64, 4096))
    prompt, sampling = [7] * 64, SamplingParams(max_tokens=NUM_OUTPUTS, seed=0)
    tenants = [f"tenant-{index}" for index in range(NUM_TENANTS)]
    running: dict[int, int] = {}
    spent_requests = spent_tokens = now = 0.0
    num_added = num_finished = num_tokens = 0
    while num_finished < NUM_REQUESTS - NUM_QUEUED:
        now += 0.02
        while num_added < NUM_REQUESTS and dispatcher.num_queued < NUM_QUEUED:
            tenant, slo_class = rng.choice(tenants), rng.choice(TIERS.names)
            began = time.thread_time()
            dispatcher.add(num_added, prompt, sampling, now, tenant=tenant, slo_class=slo_class)
            spent_requests += time.thread_time() - began
            num_added += 1
        began = time.thread_time()
        commands = dispatcher.poll(now)
        spent_requests += time.thread_time() - began
        for command in commands:
            if isinstance(command, Add):
                running[command.sequence.seq_id] = command.sequence.num_output_tokens
            else:
                running.pop(command.seq_id, None)
        outputs = []
        for seq_id, index in list(running.items()):
            is_last = index + 1 == NUM_OUTPUTS
            reason = FinishReason.LENGTH if is_last else None
            outputs.append(StepOutput(seq_id, index, SampledToken(9), reason))
            running[seq_id] = index + 1
            if is_last:
                del running[seq_id]
                num_finished += 1
        began = time.thread_time()
        dispatcher.outputs(0, outputs, now)
        dispatcher.worker_status(0, 10_000 - 6 * len(running), len(running), 0, 0)
        spent_tokens += time.thread_time() - began
        num_tokens += len(outputs)
    return 1e6 * spent_requests / num_added, 1e6 * spent_tokens / num_tokens


def main() -> None:
    print(f"{NUM_QUEUED} queued, {NUM_TENANTS} tenants, 3 tiers, 64 slots")
    print("policy    us a request  us a token")
    for policy in POLICY_NAMES:
        per_request, per_token = measure(policy)
        print(f"{policy:8}  {per_request:12.1f}  {per_token:10.2f}")


if __name__ == "__main__":
    main()
