"""`HubConfig`: whether the exported model is uploaded to the Hugging Face hub when training ends."""

from __future__ import annotations

from pydantic import model_validator

from treeward.config.base import Strict
from treeward.errors import ConfigError

__all__ = ["HubConfig"]


class HubConfig(Strict):
    """The upload of the exported model."""

    push_to_hub: bool = False
    """Upload the exported folder when training ends."""
    repo_id: str | None = None
    """Repository, as `organisation/name`."""
    private: bool = True
    """Make the repository private if it is new."""

    @model_validator(mode="after")
    def _repository_is_named(self) -> HubConfig:
        if self.push_to_hub and self.repo_id is None:
            raise ConfigError(
                "push_to_hub needs a repository",
                field="repo_id",
                got="null",
                need="organisation/name",
                fix="give hub.repo_id, or set hub.push_to_hub=false",
            )
        return self
