"""Tests that each documented field of a request is used, refused, or listed in the documentation as
one without effect.

The fields are those of the API references of OpenAI, Anthropic, Ollama, KoboldCpp and llama.cpp's
server.
"""

from pathlib import Path

import pytest
from pydantic import AliasChoices
from starlette.testclient import TestClient

from dantinox.serve.app import make_app
from dantinox.serve.options import Options
from dantinox.serve.protocols import (
    embeddings,
    kobold_bodies,
    llama_cpp,
    messages,
    ollama_bodies,
    openai_bodies,
    responses,
)
from dantinox.serve.protocols.llama_options import KNOWN_OPTIONS
from dantinox.serve.protocols.tokenize_routes import DetokenizeBody, TokenizeBody
from dantinox.text import ChatTemplate

from .fakes import BYTES, FakeEngine

DOCUMENTATION = (Path(__file__).parents[2] / "docs/serving_fields.md").read_text(encoding="utf-8")
OPENAI = """model frequency_penalty logit_bias max_tokens n presence_penalty seed stop stream stream_options
temperature top_p user
logprobs"""
LLAMA = """temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_cmpl
n_cache_reuse stream stop
typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length
dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta
grammar json_schema seed
ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot cache_prompt return_tokens samplers timings_per_token
return_progress sse_ping_interval post_sampling_probs response_fields lora adaptive_target adaptive_decay top_n_sigma"""
# Body → its documented fields.
FIELDS = {
    openai_bodies.CompletionBody: f"{OPENAI} prompt best_of echo suffix",
    openai_bodies.ChatBody: (
        f"""{OPENAI} messages audio function_call functions max_completion_tokens metadata modalities
        parallel_tool_calls prediction prompt_cache_key prompt_cache_retention reasoning_effort response_format
        safety_identifier
        service_tier store tool_choice tools top_logprobs verbosity web_search_options continue_final_message
        add_generation_prompt chat_template_kwargs guided_json guided_regex guided_choice guided_grammar
        guided_whitespace_pattern guided_decoding_backend structured_outputs json_schema grammar reasoning_format
        reasoning_control typical_p repeat_penalty dynatemp_range dry_sequence_breakers"""
    ),
    responses.ResponsesBody: (
        """background conversation context_management include
        input instructions max_output_tokens max_tool_calls metadata
        model parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning
        safety_identifier
        service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p truncation user"""
    ),
    embeddings.EmbeddingBody: "input model dimensions encoding_format user",
    messages.MessagesBody: (
        """model messages max_tokens container context_management mcp_servers metadata service_tier
        stop_sequences stream system temperature thinking tool_choice tools top_k top_p output_config
        output_format cache_control
        inference_geo speed"""
    ),
    ollama_bodies.GenerateBody: (
        """model prompt suffix images think format options system template stream raw keep_alive context
        truncate shift logprobs top_logprobs _debug_render_only"""
    ),
    ollama_bodies.ChatBody: (
        """model messages tools think format options stream keep_alive truncate shift logprobs
        top_logprobs"""
    ),
    ollama_bodies.EmbedBody: "model input truncate dimensions options keep_alive",
    ollama_bodies.OllamaOptions: (
        """num_keep seed num_predict top_k top_p min_p typical_p tfs_z repeat_last_n temperature
        repeat_penalty presence_penalty frequency_penalty penalize_newline stop numa num_ctx num_batch num_gpu main_gpu use_mmap
        use_mlock low_vram vocab_only num_thread draft_num_predict f16_kv mirostat mirostat_tau mirostat_eta"""
    ),
    kobold_bodies.GenerateBody: (
        """max_context_length max_length prompt rep_pen rep_pen_range rep_pen_slope sampler_order
        sampler_seed stop_sequence temperature tfs top_a top_k top_p min_p typical use_default_badwordsids dynatemp_range
        dynatemp_exponent smoothing_factor smoothing_curve mirostat mirostat_tau mirostat_eta genkey grammar
        grammar_retain_state
        memory images audio trim_stop render_special bypass_eos ban_eos_token banned_tokens logit_bias dry_multiplier dry_base
        dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold xtc_probability nsigma logprobs quiet
        replace_instruct_placeholders adapter banned_strings custom_token_bans reasoning_effort
        using_openai_tools singleline presence_penalty negative_prompt guidance_scale adaptive_target adaptive_decay"""
    ),
    llama_cpp.LlamaCompletionBody: f"{LLAMA} prompt",
    llama_cpp.InfillBody: f"{LLAMA} prompt input_prefix input_suffix input_extra",
    TokenizeBody: "content add_special parse_special with_pieces",
    DetokenizeBody: "tokens",
}


def used_fields(kind):
    names = set()
    for name, field in kind.model_fields.items():
        alias = field.validation_alias
        names |= {*alias.choices} if isinstance(alias, AliasChoices) else {alias or name}
    if issubclass(kind, openai_bodies.Body):
        names |= {*openai_bodies.SETTING_NAMES}
    return names | ({*KNOWN_OPTIONS} if issubclass(kind, llama_cpp.LlamaOptions) else set())


@pytest.mark.parametrize(
    "kind", FIELDS, ids=lambda kind: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
)
def test_each_documented_field_has_one_meaning(kind):
    used = used_fields(kind)
    for name in FIELDS[kind].split():
        meanings = [
            name in used - {*kind.unsupported},
            name in kind.unsupported,
            name in kind.ignored,
        ]
        assert sum(meanings) == 1, f"{name} is used, unsupported, ignored: {meanings}"


@pytest.mark.parametrize(
    "kind", FIELDS, ids=lambda kind: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
)
def test_fields_without_effect_are_in_the_documentation(kind):
    missing = [name for name in kind.ignored if f"`{name}`" not in DOCUMENTATION]
    assert missing == []


MESSAGES = [{"role": "user", "content": "a"}]
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
    "/v1/embeddings": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/api/generate": {"prompt": "a"},
    "/api/chat": {"messages": MESSAGES},
    "/api/embed": {"input": "a"},
    "/completion": {"prompt": "a", "n_predict": 2},
}


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_logged(path, caplog):
    caplog.set_level("WARNING", "dantinox.serve")
    app = make_app(FakeEngine(), Options(template=ChatTemplate.from_name("plain", BYTES)))
    name = f"unknown_field_of_{path.replace('/', '_')}"  # equal lines are logged once a minute
    with TestClient(app, base_url="http://localhost") as client:
        assert client.post(path, json=BODIES[path] | {name: 1}).status_code == 200
    assert f"the unknown field {name}, which has no effect" in caplog.text
