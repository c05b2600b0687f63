"""DantinoX: train transformers from one YAML file, or import them, fine-tune them and generate
text.

    import dantinox

    model = dantinox.load("runs/quickstart")
    print(model.generate("def ", top_p=0.9).text)

The names below are the public API. Each name is imported on first use, so `import dantinox` itself
is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time names are imported when first used
    from dantinox.config import Config as Config
    from dantinox.config import UserError as UserError
    from dantinox.config import load_config as load_config
    from dantinox.generation import Constraint as Constraint
    from dantinox.generation import load as load
    from dantinox.generation import prepare as prepare
    from dantinox.generation.api.generate_ids import generate as generate
    from dantinox.interop.checkpoints import export_checkpoint as export_checkpoint
    from dantinox.interop.checkpoints import import_checkpoint as import_checkpoint
    from dantinox.model import Transformer as Transformer
    from dantinox.text import Tokenizer as Tokenizer
    from dantinox.training.launch import launch as launch

__version__ = "1.0.0rc1"
PUBLIC = {
    "Config": "dantinox.config",
    "UserError": "dantinox.config",
    "load_config": "dantinox.config",
    "Tokenizer": "dantinox.text",
    "Transformer": "dantinox.model",
    "export_checkpoint": "dantinox.interop.checkpoints",
    "import_checkpoint": "dantinox.interop.checkpoints",
    "Constraint": "dantinox.generation",
    "generate": "dantinox.generation",
    "load": "dantinox.generation",
    "prepare": "dantinox.generation",
    "launch": "dantinox.training",
}
__all__ = [*PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'dantinox' has no attribute {name!r}")
    return getattr(import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
