"""What the served model can do, for the routes that describe it."""

from dantinox.serve.service import Service
from dantinox.text.fill_in_middle import fim_format


def capabilities(service: Service) -> dict[str, bool]:
    """Returns the capabilities of the model by name.

    `completion` and `embeddings` are always available, `chat` needs a chat template, and `fim` (fill in the middle) a
    vocabulary with its tokens.
    """
    return {
        "completion": True,
        "chat": service.options.template is not None,
        "fim": fim_format(service.tokenizer) is not None,
        "embeddings": True,
        "vision": False,
    }
