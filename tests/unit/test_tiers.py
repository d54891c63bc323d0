from typing import Any

import pytest

from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.intake import RawRequest
from shoal.backend.request_class import classify
from shoal.scheduler.errors import RequestError
from shoal.scheduler.tiers import TenantTable, TierTable, tenant_name

TIERS = {"interactive": {"weight": 8, "ttft_ms": 500, "tpot_ms": 50}, "batch": None}


def config(**values: Any) -> EngineConfig:
    return EngineConfig.from_dict({"weights": "w", **values})


class TestTierTable:
    def test_without_settings_there_is_one_tier(self) -> None:
        table = config().tier_table()
        assert table.names == ("standard",)
        assert table.get().weight == 1.0
        assert config().policy == "fcfs"

    def test_settings_are_read(self) -> None:
        table = config(tiers=TIERS).tier_table()
        tier = table.get("interactive")
        assert (tier.weight, tier.ttft_ms, tier.tpot_ms) == (8, 500, 50)
        assert table.get("batch").weight == 1.0
        assert table.get() is tier  # no standard: the first

    def test_the_default_can_be_named(self) -> None:
        assert config(tiers=TIERS, default_tier="batch").tier_table().get().name == "batch"

    def test_standard_is_the_default_where_there_is_one(self) -> None:
        table = TierTable.from_dict({"high": {"weight": 2}, "standard": None})
        assert table.get(None).name == "standard"
        assert table.get("").name == "standard"

    @pytest.mark.parametrize("slo_class", ["gold", 5, True, "x" * 1000])
    def test_an_unknown_class_names_the_allowed_ones(self, slo_class: Any) -> None:
        with pytest.raises(RequestError, match="interactive, batch") as error:
            config(tiers=TIERS).tier_table().get(slo_class)
        assert (error.value.status, error.value.param) == (400, "slo_class")
        assert len(error.value.message) < 200

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"policy": "lifo"}, "fcfs, priority, wfq, vtc"),
            ({"policy": None}, "fcfs, priority, wfq, vtc"),
            ({"policy": ["wfq"]}, "fcfs, priority, wfq, vtc"),
            ({"tiers": {}}, "1 to 16"),
            ({"tiers": ["high"]}, "tiers must map"),
            ({"tiers": {"a": 3}}, r"tiers\.a must map weight, ttft_ms, tpot_ms"),
            ({"tiers": {"a": {"weigth": 3}}}, r"'weigth' in tiers\.a.*weight, ttft_ms"),
            ({"tiers": {"a": {"weight": 0}}}, r"tiers\.a\.weight must be a number in"),
            ({"tiers": {"a": {"weight": float("nan")}}}, r"tiers\.a\.weight"),
            ({"tiers": {"a": {"weight": True}}}, r"tiers\.a\.weight"),
            ({"tiers": {"a": {"ttft_ms": "soon"}}}, r"tiers\.a\.ttft_ms"),
            ({"tiers": {3: {}}}, "a tier's name must be text"),
            ({"tiers": {f"t{i}": {} for i in range(17)}}, "1 to 16"),
            ({"default_tier": "gold"}, "default_tier must be one of standard"),
            ({"default_tier": ["gold"]}, "default_tier must be one of standard"),
            ({"tenants": {"a": {"max_requests": 0}}}, "max_requests must be a whole number"),
            ({"tenants": {"a": {"weight": -1}}}, "weight"),
            ({"tenants": {"a": {"limit": 1}}}, r"'limit' in tenants\.a"),
            ({"max_queued_tokens": 0}, "max_queued_tokens"),
            ({"max_request_seconds": 0}, "max_request_seconds"),
            ({"max_request_seconds": "long"}, "max_request_seconds"),
            ({"max_preemptions": -1}, "max_preemptions"),
            ({"min_run_s": "long"}, "min_run_s"),
        ],
    )
    def test_bad_settings_are_named(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config(**values)


def test_tenants_that_are_not_named_share_the_settings_of_the_star() -> None:
    table = TenantTable.from_dict({"*": {"max_requests": 2}, "big": {"weight": 3}})
    assert table.get("anybody").max_requests == 2
    assert table.get("big").max_requests is None
    assert table.get("big").weight == 3
    assert TenantTable().get("anybody").max_requests is None


def test_tenant_names_are_checked() -> None:
    assert tenant_name(None) == tenant_name("") == "default"
    assert tenant_name("blue") == "blue"
    for bad in (5, "x" * 200):
        with pytest.raises(RequestError) as error:
            tenant_name(bad)
        assert error.value.param == "tenant"


class TestClassify:
    def classify(self, sampling: str | None = None, **parameters: Any) -> tuple[Any, ...]:
        raw = RawRequest(
            text_input="hi",
            sampling_parameters=sampling,
            parameters=parameters,
        )
        found = classify(raw, TierTable.from_dict(TIERS))
        return found.tenant, found.tier.name, found.timeout_s

    def test_absent_means_defaults(self) -> None:
        assert self.classify() == ("default", "interactive", None)

    def test_parameters(self) -> None:
        found = self.classify(tenant="blue", slo_class="batch", timeout=1500)
        assert found == ("blue", "batch", 1.5)

    def test_a_number_may_come_as_text(self) -> None:
        assert self.classify(timeout="250")[2] == 0.25

    def test_sampling_json_but_for_the_tenant(self) -> None:
        text = '{"timeout": 300, "slo_class": "batch", "tenant": "mine"}'
        assert self.classify(text) == ("default", "batch", 0.3)

    def test_parameters_win_over_json_and_headers_over_both(self) -> None:
        raw = RawRequest(
            sampling_parameters='{"timeout": 300}',
            parameters={"timeout": 200, "tenant": "client", "x-shoal-tenant": "gateway"},
        )
        found = classify(raw, TierTable.from_dict(TIERS))
        assert (found.tenant, found.timeout_s) == ("gateway", 0.2)
        raw.parameters = {"x-shoal-slo-class": "batch"}
        assert classify(raw, TierTable.from_dict(TIERS)).tier.name == "batch"

    @pytest.mark.parametrize(
        ("parameters", "expected"), [({}, 2.0), ({"timeout": 5000}, 2.0), ({"timeout": 500}, 0.5)]
    )
    def test_no_timeout_is_longer_than_the_operators_cap(
        self, parameters: dict[str, Any], expected: float
    ) -> None:
        raw = RawRequest(text_input="hi", parameters=parameters)
        assert classify(raw, TierTable.from_dict(TIERS), 2.0).timeout_s == expected

    @pytest.mark.parametrize("timeout", [0, -5, True, "soon", float("nan"), 10**12])
    def test_a_bad_timeout_is_named(self, timeout: Any) -> None:
        with pytest.raises(RequestError, match="milliseconds") as error:
            self.classify(timeout=timeout)
        assert error.value.param == "timeout"

    @pytest.mark.parametrize("text", ["{", "[]", "3", '{"timeout": null}'])
    def test_bad_json_is_left_to_intake(self, text: str) -> None:
        assert self.classify(text) == ("default", "interactive", None)
