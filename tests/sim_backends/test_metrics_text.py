from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from sim_backends import generations, metrics_text
from sim_backends.engine import Engine
from sim_backends.metrics_text import About, Load
from tests.sim_backends.builders import VECTORS, a_request, an_engine, prompt, run_out


def rendered(engine: Engine, *, load: Load | None = None, name: str = "vllm-0.33", model: str = "m") -> str:
    about = About(model, generations.GENERATIONS[name], started_s=1767225600.5, memory_share=0.9)
    return metrics_text.render(engine, about, load)


def samples(engine: Engine) -> dict[tuple[str, str], float]:
    """Value by (name, the label that tells series of one name apart)."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(rendered(engine, load=Load.of(engine))):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            told = labels.get("le") or labels.get("source") or labels.get("finished_reason") or ""
            found[sample.name, told] = sample.value
    return found


def test_the_page_tells_load_while_requests_run_and_wait() -> None:
    engine = an_engine(max_running=1, kv_blocks=100)
    for name in "ab":
        engine.submit(a_request(160, output=50, max_tokens=50, request_id=name), 0.0)
    engine.advance(0.0)
    page = samples(engine)
    assert page["vllm:num_requests_running", ""] == 1.0
    assert page["vllm:num_requests_waiting", ""] == 1.0
    assert page["vllm:kv_cache_usage_perc", ""] == 0.1


def test_the_page_counts_what_has_been_done() -> None:
    engine = an_engine()
    for at_s in (0.0, 5.0):
        engine.submit(a_request(prompt(100), output=4), at_s)
        run_out(engine)
    page = samples(engine)
    assert page["vllm:prefix_cache_queries_total", ""] == 200.0
    assert page["vllm:prefix_cache_hits_total", ""] == 96.0
    assert page["vllm:prompt_tokens_total", ""] == 200.0
    assert page["vllm:prompt_tokens_by_source_total", "local_compute"] == 104.0
    assert page["vllm:generation_tokens_total", ""] == 8.0
    assert page["vllm:request_success_total", "stop"] == 2.0
    assert page["vllm:time_to_first_token_seconds_count", ""] == 2.0
    assert page["vllm:time_to_first_token_seconds_bucket", "+Inf"] == 2.0
    assert page["vllm:time_to_first_token_seconds_bucket", "0.001"] == 0.0
    assert page["process_start_time_seconds", ""] == 1767225600.5


def test_cache_config_tells_block_size_and_count() -> None:
    text = rendered(an_engine(kv_blocks=77), model='a"b\\c')
    (info,) = [f for f in text_string_to_metric_families(text) if f.name == "vllm:cache_config_info"]
    labels = info.samples[0].labels
    assert (labels["block_size"], labels["num_gpu_blocks"], labels["model_name"]) == ("16", "77", 'a"b\\c')


def test_a_page_without_load_has_everything_else() -> None:
    engine = an_engine()
    with_load, without = rendered(engine, load=Load(7.0, 3.0, 0.5)), rendered(engine)
    gone = {*with_load.splitlines()} - {*without.splitlines()}
    assert {line.split("{")[0] for line in gone if line[0] != "#"} == {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    }


def test_a_factor_makes_load_wrong_and_may_pass_one() -> None:
    engine = an_engine(kv_blocks=100)
    engine.submit(a_request(960, output=50), 0.0)
    engine.advance(0.0)
    assert Load.of(engine, factor=2.0) == Load(running=2.0, waiting=0.0, used_share=1.2)


def test_vllm_0_9_tells_cache_figures_under_their_old_names_too() -> None:
    recorded = {line.split("{")[0] for line in (VECTORS / "metrics_vllm_0.9.2_legacy.txt").read_text().splitlines()}
    ours = rendered(an_engine(), load=Load(1.0, 1.0, 0.25), name="vllm-0.9").splitlines()
    cache = {line.split("{")[0] for line in ours if "cache_" in line and line[0] != "#"}
    assert {"vllm:gpu_cache_usage_perc", "vllm:gpu_prefix_cache_hits_total"} <= cache
    assert {name for name in cache if "external" not in name and "prompt" not in name} <= recorded
