"""What `fineinfer serve` shows on the terminal: the memory plan at start and a line while there is work."""

from __future__ import annotations

import time

from fineinfer.config import Config
from fineinfer.messages import EngineInfo, EngineStats

PERIOD_S = 5.0
GIB = 1 << 30


def print_banner(info: EngineInfo, config: Config) -> None:
    """The memory plan, the limits and the addresses."""
    plan = info.memory_plan
    order = ("weights", "workspace", "adapters", "training", "kv_now")
    parts = " | ".join(f"{name.removesuffix('_now')} {plan[name] / GIB:.2f}" for name in order if name in plan)
    host, port = config.server.host, config.server.port
    print(f"{info.base_model}: {info.dtype} on {info.device}, context {info.max_model_len} tokens", flush=True)
    print(f"memory plan (GiB of {plan['budget'] / GIB:.2f}): {parts}", flush=True)
    print(
        f"one request: at most {info.max_request_tokens} tokens; KV pool at its largest {plan['kv_max'] / GIB:.2f} GiB",
        flush=True,
    )
    url = f"http://{host}:{port}"
    print(f"ready: {url}/v1 (API), {url}/metrics; policy {config.scheduler.policy}", flush=True)


class StatusLine:
    """Prints one line every few seconds while something happens; silent when idle."""

    def __init__(self) -> None:
        self._last: EngineStats | None = None
        self._printed_s = time.monotonic()

    def update(self, stats: EngineStats) -> None:
        """Take a new snapshot; print if it is time and anything moved."""
        last, now = self._last, time.monotonic()
        if last is None or last.boot_id != stats.boot_id:
            self._last = stats
            return
        if now - self._printed_s < PERIOD_S:
            return
        if self._is_idle(last, stats):
            self._last = stats
            return
        elapsed = max(1e-3, stats.time_s - last.time_s)
        prompt = (stats.prompt_tokens_total - last.prompt_tokens_total) / elapsed
        generated = (stats.generation_tokens_total - last.generation_tokens_total) / elapsed
        line = (
            f"running {stats.num_running}, waiting {stats.num_waiting}, prompt {prompt:.0f} tok/s, "
            f"generation {generated:.1f} tok/s, KV {stats.kv_slots_used}/{stats.kv_slots_now} slots"
        )
        if stats.train_job_id is not None:
            loss = "-" if stats.train_loss is None else f"{stats.train_loss:.4f}"
            eta = "-" if stats.train_eta_s is None else f"{stats.train_eta_s:.0f} s"
            line += (
                f" | {stats.train_job_id} step {stats.train_step}/{stats.train_total_steps} loss {loss} "
                f"{stats.train_tokens_per_s:.0f} tok/s ETA {eta}"
            )
        print(line, flush=True)
        self._printed_s, self._last = now, stats

    @staticmethod
    def _is_idle(last: EngineStats, stats: EngineStats) -> bool:
        return (
            stats.num_running == stats.num_waiting == 0
            and stats.generation_tokens_total == last.generation_tokens_total
            and stats.train_step == last.train_step
        )
