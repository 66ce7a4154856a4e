"""The one error tree. A message is a single line: what is wrong, the two values that disagree, what to do."""


class ElsiError(Exception):
    """Base of every error raised on purpose; the CLI prints it as one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(ElsiError):
    """An option or argument that cannot be used as given."""

    exit_code = 2


class ConfigError(UsageError):
    """A settings object with a value out of its documented range."""


class ModelError(ElsiError):
    """A model reference that cannot be resolved, read, or is of a kind that is not supported."""


class DataError(ElsiError):
    """A prompts file, shard or other data file that cannot be used."""


class PromptError(UsageError):
    """A prompt that cannot be run: empty, not text, or longer than the context."""


class SelectionError(ElsiError):
    """A layer selection that cannot be made, or that disagrees with a draft or target."""


class DraftError(ElsiError):
    """A draft checkpoint that is broken, or that was trained for something else."""


class BundleError(ElsiError):
    """A bundle that is incomplete, altered, or of an unknown format."""


class ParityError(ElsiError):
    """An exported graph that does not compute what the source model computes."""


class ProviderError(ElsiError):
    """An ONNX Runtime execution provider that is not there."""


class StorageError(ElsiError):
    """A file that cannot be written or read: no space, no permission, read-only; or too little memory."""


class MissingExtraError(ElsiError):
    """A command that needs packages of an extra that is not installed."""

    def __init__(self, feature: str, *, extra: str, module: str) -> None:
        super().__init__(
            f"{feature} needs the package {module!r}, which is not installed: pip install 'elsi-edge[{extra}]'"
        )
