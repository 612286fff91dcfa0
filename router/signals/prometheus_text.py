"""Load of each engine rank, read from one scrape of its /metrics.

Model     running, waiting and KV use by the names of vLLM (old and new) and SGLang, one `Load` per rank label. A page
          changes in its numbers and rarely in its lines: `PageReader` remembers where the wanted lines were and looks
          there first, which costs a tenth of searching
Valid     Prometheus text format; several series of one rank (priorities, tensor ranks) count as one
Blind to  histograms and everything else on the page: only lines with a wanted name are looked at. A wanted line that
          is new on a page is seen within `LEARN_EVERY` reads
Source    recorded scrapes in tests/vectors

Unknown is not zero: what is absent, not a number or out of range stays None and counts as an anomaly where
it was present.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from router.signals.load import LARGEST_BLOCK, SHARES, Load, is_usable, pick

__all__ = ["BIG_PAGE", "LEARN_EVERY", "Load", "PageReader", "load_of", "loads_of"]

# Of two names for one field the first that is present counts, so new names stand before old ones.
_GAUGES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "used_tokens": ("sglang:num_used_tokens",),
    "max_tokens": ("sglang:max_total_num_tokens",),
    "cache_hit_rate": ("sglang:cache_hit_rate",),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "generated_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "block_size": ("sglang:page_size",),
    "num_gpu_blocks": ("sglang:num_pages",),
}
_CONFIG, _SLEEP, _STARTED = "vllm:cache_config_info", "vllm:engine_sleep_state", "process_start_time_seconds"
_WANTED = (*(name for names in _GAUGES.values() for name in names), _CONFIG, _SLEEP, _STARTED)
_WHOLE = frozenset({"block_size", "num_gpu_blocks"})
# Before a value, which an exemplar may follow. Possessive and from word to word, so that rubbish is passed over once
# instead of being tried again from each of its characters.
_LABELS = re.compile(r'\{(?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+\}|[ \t]')
_LABEL = re.compile(r'\b([A-Za-z_][A-Za-z0-9_]*+)="((?:[^"\\]++|\\.)*+)"', re.ASCII)
_LONGEST_LABELS = 4096  # characters, braces included; a line with more is left alone
_MOST_LINES = 8192  # of one name: a thousand ranks with several series each
_REACHES = (64, 2048)  # characters a line may have moved since it was last seen
_UNBELIEVABLE = 1e300  # so that infinity is none of the believable
LEARN_EVERY = 64  # reads between two searches of the whole page
BIG_PAGE = 1 << 17  # characters from which a search is worth doing in slices

Labels = dict[str, str]


@dataclass(slots=True)
class _Line:
    """One wanted line. head : newline, name and labels, up to the number; at : where head started when last seen."""

    head: str
    at: int
    labels: Labels
    value: float | None


Lines = dict[str, list[_Line]]  # by name, in page order


def load_of(text: str, rank: str | None = None) -> Load:
    """Load of one rank, or of all ranks together: counts summed, shares averaged, unknown if any is unknown.

    A rank the page does not name gives a `Load` in which everything is unknown.
    """
    return pick(loads_of(text), rank)


def loads_of(text: str) -> dict[str, Load]:
    """Every rank on the page, by its label (`engine` of vLLM, `dp_rank` of SGLang; "0" without one)."""
    page = "\n" + text
    return _loads({name: _search(page, name) for name in _WANTED})


class PageReader:
    """Reads the pages of one endpoint, one after the other. Gives what `loads_of` gives.

    searches : pages that had to be searched from end to end
    """

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self.searches = 0
        self._lines: Lines = {}
        self._plan: _Plan | None = None
        self._reads_left = 0

    @property
    def is_sglang(self) -> bool:
        """Whether the last page was SGLang's."""
        return any(lines for name, lines in self._lines.items() if name.startswith("sglang:"))

    def read(self, text: str) -> dict[str, Load]:
        for _ in self.slices(text):
            pass
        return self.loads

    def slices(self, text: str) -> Iterator[None]:
        """The same in steps, so that others may run between them; `loads` is new once they are used up."""
        page = "\n" + text
        self._reads_left -= 1
        if self._reads_left >= 0 and self._plan is not None and self._looked_again(page):
            self.loads = self._plan.loads() or _loads(self._lines)
            return
        self.searches += 1
        self._reads_left = LEARN_EVERY
        found: Lines = {}
        for name in _WANTED:
            found[name] = _search(page, name)
            yield
        self._lines, self.loads = found, _loads(found)
        blind = not any(load.says_something() for load in self.loads.values())
        self._plan = None if blind else _Plan(found, self.loads)  # a page that says nothing is searched every time

    def _looked_again(self, page: str) -> bool:
        """Read the known lines where they should be. False when one is not there: the page has changed its shape."""
        shift = 0
        for lines in self._lines.values():
            for line in lines:
                head = line.head
                at = line.at + shift
                if not page.startswith(head, at):
                    at = _near(page, head, at)
                    if at < 0:
                        return False
                    shift = at - line.at
                line.at = at
                start = at + len(head)
                try:
                    line.value = _believable(float(page[start : page.index("\n", start)]))
                except ValueError:
                    line.value = _number_at(page, start)
        return True


class _Plan:
    """Which line sets which field of which rank, where each is set by one line alone; else `loads` is always empty.

    What hangs on labels is the same as long as the lines are.
    """

    def __init__(self, lines: Lines, loads: dict[str, Load]) -> None:
        self._facts = {rank: astuple(load) for rank, load in loads.items()}
        self._numbers: list[tuple[_Line, str, str]] = []
        self._sleep = [line for line in lines[_SLEEP] if line.labels.get("sleep_state") == "awake"]
        self._started = lines[_STARTED]
        for field, names in _GAUGES.items():
            for name in names:
                self._numbers += [(line, _rank(line.labels), field) for line in lines[name]]
        places = [(rank, field) for _, rank, field in self._numbers]
        anomalous = any(load.anomalies for load in loads.values())
        priorities = any(line.labels.get("priority") for line, *_ in self._numbers)
        whole = any(field in _WHOLE for _, field in places)
        self._fits = len(set(places)) == len(places) and not (anomalous or priorities or whole)

    def loads(self) -> dict[str, Load]:
        """The loads the lines now give; empty where a value needs a closer look."""
        if not self._fits:
            return {}
        loads = {rank: Load(*facts) for rank, facts in self._facts.items()}
        for line, rank, field in self._numbers:
            value = line.value
            if value is None or not 0.0 <= value < _UNBELIEVABLE or (value > 1.0 and field in SHARES):
                return {}
            setattr(loads[rank], field, value)
        for line in self._sleep:
            loads[_rank(line.labels)].asleep = None if line.value is None else line.value == 0.0
        started_s = self._started[0].value if self._started else None
        for load in loads.values():
            load.started_s = started_s
        return loads


def _near(page: str, head: str, at: int) -> int:
    """Where `head` starts around `at`, or -1; most lines have moved by a few digits."""
    for reach in _REACHES:
        found = page.find(head, max(0, at - reach), at + reach + len(head))
        if found >= 0:
            return found
    return -1


def _search(page: str, name: str) -> list[_Line]:
    """Lines of exactly this name; the value is None where it is not a finite number. None of too many to be true."""
    needle = "\n" + name
    lines: list[_Line] = []
    at = page.find(needle)
    while at >= 0:
        start = at + len(needle)
        end = page.find("\n", start)
        end = end if end >= 0 else len(page)
        labels = _LABELS.match(page, start, min(end, start + _LONGEST_LABELS))
        if labels is not None:
            if len(lines) == _MOST_LINES:
                return []
            head = labels[0]
            lines.append(_Line(needle + head, at, dict(_LABEL.findall(head)), _number_at(page, start + len(head))))
        at = page.find(needle, start)
    return lines


def _believable(value: float) -> float | None:
    """None for infinities, what is no number, and what nothing here can be."""
    return value if -_UNBELIEVABLE < value < _UNBELIEVABLE else None


def _number_at(page: str, start: int) -> float | None:
    end = page.find("\n", start)
    rest = page[start : end if end >= 0 else len(page)]
    try:
        value = float(rest)
    except ValueError:
        try:
            value = float(rest.split()[0])  # a timestamp may follow
        except (ValueError, IndexError):
            return None
    return _believable(value)


def _loads(lines: Lines) -> dict[str, Load]:
    loads: dict[str, Load] = {}
    for field, names in _GAUGES.items():
        for name in names:
            if lines.get(name):
                _read_gauge(lines[name], field, loads)
    for line in lines.get(_CONFIG, ()):
        load = loads.setdefault(_rank(line.labels), Load())
        size = _integer(line.labels.get("block_size"))
        load.block_size = size if size is not None and size <= LARGEST_BLOCK else None
        load.num_gpu_blocks = _integer(line.labels.get("num_gpu_blocks"))
    for line in lines.get(_SLEEP, ()):
        if line.labels.get("sleep_state") == "awake" and line.value is not None:
            loads.setdefault(_rank(line.labels), Load()).asleep = line.value == 0.0
    started = lines.get(_STARTED)
    for load in loads.values():
        load.started_s = started[0].value if started else None
    return loads


def _read_gauge(lines: Sequence[_Line], field: str, loads: dict[str, Load]) -> None:
    fresh: dict[str, float] = {}
    for line in lines:
        if line.labels.get("priority"):  # the total stands under the empty priority
            continue
        rank, value = _rank(line.labels), line.value
        load = loads.setdefault(rank, Load())
        if value is None or not _is_usable(field, value):
            load.anomalies += 1
        elif getattr(load, field) is None:
            fresh[rank] = max(value, fresh.get(rank, 0.0))
    for rank, value in fresh.items():
        setattr(loads[rank], field, int(value) if field in _WHOLE else value)


def _is_usable(field: str, value: float) -> bool:
    if field in _WHOLE:
        return 1.0 <= value <= (LARGEST_BLOCK if field == "block_size" else _UNBELIEVABLE) and value.is_integer()
    return is_usable(field, value)


def _rank(labels: Labels) -> str:
    return labels.get("engine") or labels.get("dp_rank") or "0"


def _integer(text: str | None) -> int | None:
    """A size or count of blocks; 0 is none."""
    return (int(text) if text is not None and text.isdecimal() and len(text) < 16 else 0) or None
