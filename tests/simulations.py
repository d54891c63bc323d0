"""Simulations of a machine whose steps cost round numbers."""

from functools import partial
from typing import Any

from shoal.load.records import SimulationResult
from shoal.load.simulation import Simulation, SimulationConfig, saturation_rate
from shoal.load.step_cost import StepCost
from shoal.load.workload import Request, Segment, Workload
from shoal.load.workloads import WorkloadOptions

COST = StepCost(base=0.02, per_prefill_token=0.001, per_decode_seq=0.002)
CONFIG = SimulationConfig(cost=COST)


def make_request(
    arrival: float, num_prompt_tokens: int, num_output_tokens: int, name: str = ""
) -> Request:
    key = name or f"request at {arrival}"
    prompt = (Segment(f"prompt of {key}", num_prompt_tokens),)
    return Request(arrival, prompt, Segment(f"answer to {key}", num_output_tokens))


def make_options(config: SimulationConfig = CONFIG, **options: Any) -> WorkloadOptions:
    return WorkloadOptions(partial(saturation_rate, config), **options)


def simulate(workload: Workload, config: SimulationConfig = CONFIG) -> SimulationResult:
    return Simulation(workload, config).run()
