from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from sim_backends import metrics_text
from sim_backends.engine import Engine
from tests.sim_backends.builders import a_request, an_engine, prompt, run_out


def samples(engine: Engine, model: str = "m") -> dict[tuple[str, str], float]:
    """Value by (name, the label that tells series of one name apart)."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(metrics_text.render(engine, model=model, memory_share=0.9)):
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
    assert page["process_start_time_seconds", ""] > 1e9


def test_cache_config_tells_block_size_and_count() -> None:
    text = metrics_text.render(an_engine(kv_blocks=77), model='a"b\\c', memory_share=0.9)
    (info,) = [f for f in text_string_to_metric_families(text) if f.name == "vllm:cache_config_info"]
    labels = info.samples[0].labels
    assert (labels["block_size"], labels["num_gpu_blocks"], labels["model_name"]) == ("16", "77", 'a"b\\c')
