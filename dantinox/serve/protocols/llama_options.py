"""Sampling options of llama.cpp, which Ollama shares, and their conversion to settings."""

from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from dantinox.config import GenerationSection
from dantinox.config.request_overlay import REQUEST_KEYS
from dantinox.serve.protocols.bodies import StrictBody, to_integer

Integer = BeforeValidator(to_integer)
Number = Annotated[float, Field(allow_inf_nan=False)]


def _to_texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class LlamaOptions(StrictBody):
    """Sampling options. Every key of `generation` and `router` is an additional option.

    Attributes:
      num_predict: maximum number of new tokens; -1 and -2: as many as fit into the context.
      temperature: temperature; 0 is greedy.
      top_k: number of most likely tokens kept; 0 disables it.
      typical_p: mass of locally typical sampling; 1 disables it.
      tfs_z: mass of tail-free sampling; 1 disables it.
      repeat_penalty: repetition penalty over prompt and answer.
      repeat_last_n: number of last tokens that the repetition penalty covers; 0 disables it, -1 covers all.
      seed: seed of the sampler; a negative value chooses a random seed.
      stop: strings that end the answer.
    """

    num_predict: Annotated[int, Integer, Field(ge=-2, lt=2**31)] | None = Field(
        None, validation_alias=AliasChoices("num_predict", "n_predict")
    )
    temperature: Number | None = None
    top_k: Annotated[int, Integer, Field(lt=2**31)] | None = None
    typical_p: Number | None = None
    tfs_z: Number | None = None
    repeat_penalty: Number | None = None
    repeat_last_n: Annotated[int, Integer, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_to_texts)] | None = None

    def settings(self, base: GenerationSection, context: int) -> dict[str, object]:
        """Returns the settings of the request, for `EngineProtocol.settings`.

        Args:
          base: the generation settings of the server.
          context: the context of the server, the limit for `num_predict: -1`.
        """
        extra = {name: value for name, value in (self.model_extra or {}).items() if name in REQUEST_KEYS and value is not None}
        found: dict[str, Any] = {
            "max_new_tokens": context if self.num_predict is not None and self.num_predict < 0 else self.num_predict,
            "temperature": self.temperature,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "typical": self.typical_p,
            "tail_free": self.tfs_z,
            "stop": None if self.stop is None else [text for text in self.stop if text],
        }
        found |= self._penalties(base)
        found = {name: value for name, value in found.items() if value is not None}
        if self.seed is not None:
            found["seed"] = self.seed % 2**32 if self.seed >= 0 else None
        if found.get("temperature"):
            found.setdefault("greedy", False)  # a temperature overrides greedy decoding of the server's settings
        return found | extra

    def _penalties(self, base: GenerationSection) -> dict[str, object]:
        if self.repeat_last_n == 0:  # this disables the penalty in Ollama, but means all tokens in DantinoX
            return {"repetition_penalty": 1.0}
        penalty = base.repetition_penalty if self.repeat_penalty is None else self.repeat_penalty
        if self.repeat_last_n is None or penalty == 1:
            return {"repetition_penalty": self.repeat_penalty}
        return {"repetition_penalty": self.repeat_penalty, "repetition_range": max(self.repeat_last_n, 0)}
