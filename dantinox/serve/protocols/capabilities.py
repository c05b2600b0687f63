"""What the served model can do, for the routes that describe it."""

from dantinox.serve.service import Service
from dantinox.text.fill_in_middle import fim_format


def capabilities(service: Service) -> dict[str, bool]:
    """Returns the capabilities of the model by name.

    `completion` and `embeddings` are always available, `chat` and `tools` need a chat template,
    `reasoning` a template with delimiters of reasoning, and `fim` (fill in the middle) a vocabulary
    with its tokens.
    """
    has_template = service.options.template is not None
    return {
        "completion": True,
        "chat": has_template,
        "tools": has_template,
        "reasoning": has_template and service.reply_format.reasons,
        "fim": fim_format(service.tokenizer) is not None,
        "embeddings": True,
        "vision": False,
    }
