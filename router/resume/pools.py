"""Which pools' streams go on when they break, and by which settings. A pool is known by the model it serves."""

from __future__ import annotations

import msgspec

from router.resume.log import ResumeConfig


class ResumePools(ResumeConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section `resume`: the settings of all pools, but for those that have their own."""

    # base model, as its replicas name it -> all settings of their pool
    models: dict[str, ResumeConfig] = msgspec.field(default_factory=dict)

    @property
    def anywhere(self) -> bool:
        """Whether any pool's streams go on."""
        return self.enabled or any(config.enabled for config in self.models.values())

    def of(self, model: str) -> ResumeConfig | None:
        """How streams of the pool of `model` go on; None: they do not."""
        config = self.models.get(model, self)
        return config if config.enabled else None
