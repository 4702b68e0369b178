"""A target with its settings, and drafters that speed it up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.drafters import registry
from specjax.drafters.base import Drafter
from specjax.engine import generate as generation
from specjax.engine.load import LoadedDraft, Model
from specjax.engine.request import Generation, Prompt


class Speculation(NamedTuple):
    """A drafter by its name, with everything that it needs.

    Attributes:
      drafter: name, see `specjax.generate`.
      draft: its draft model or EAGLE head, from `specjax.load_drafter`.
      num_speculative_tokens: K.
      options: options of the drafter.
    """

    drafter: str
    draft: LoadedDraft | None
    num_speculative_tokens: int
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A target and how it is run.

    Attributes:
      target: the model.
      verify: verification method.
      page_size: positions per page of the KV caches.
      implementation: implementation of attention and verification; None for the default.
    """

    target: Model
    verify: str = "rejection"
    page_size: int = 64
    implementation: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether greedy texts must be equal with and without speculation.

        In less than float32, passes over one and over several tokens may decide near ties
        differently.
        """
        return self.target.dtype == np.float32

    def generate(
        self, speculation: Speculation | None, prompts: Sequence[Prompt], **options
    ) -> Generation:
        """Generates with a drafter, or plainly; `options` are those of `specjax.generate`."""
        options |= {
            "verify": self.verify,
            "page_size": self.page_size,
            "implementation": self.implementation,
        }
        if speculation is None:
            return generation.generate(self.target, "none", prompts, **options)
        return generation.generate(
            self.target,
            speculation.drafter,
            prompts,
            draft=speculation.draft,
            num_speculative_tokens=speculation.num_speculative_tokens,
            drafter_options=speculation.options,
            **options,
        )

    def make_drafters(self, speculation: Speculation) -> list[tuple[Drafter, Any]]:
        """Makes each drafter that `speculation` lists, with its parameters.

        Raises:
          SpecJAXError: a drafter, draft or option that cannot be used.
        """
        whole = self._make(speculation)
        names = speculation.drafter.split(",")
        if len(names) == 1:
            return [whole]
        made = []
        for name in names:
            known = registry.option_types(name)
            options = {key: value for key, value in speculation.options.items() if key in known}
            draft = speculation.draft if any(registry.draft_config_types(name)) else None
            made.append(
                self._make(speculation._replace(drafter=name, draft=draft, options=options))
            )
        return made

    def _make(self, speculation: Speculation) -> tuple[Drafter, Any]:
        return generation.named_drafter(
            speculation.drafter,
            self.target,
            speculation.draft,
            speculation.num_speculative_tokens,
            speculation.options,
        )
