"""Counts of matrix multiplications and collectives, against programs counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from dantinox.lab.measure.program_cost import Work, count_work

PROGRAM = """HloModule example, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%multiply (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0:T(8,128)S(1)} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%turn (state: (s32[], f32[8,16], f32[16,4])) -> (s32[], f32[8,16], f32[16,4]) {
  %state = (s32[], f32[8,16]{1,0}, /*index=2*/f32[16,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %a = f32[8,16]{1,0} get-tuple-element(%state), index=1
  %b = f32[16,4]{1,0} get-tuple-element(%state), index=2
  %fusion.1 = f32[8,4]{1,0} fusion(%a, %b), kind=kOutput, calls=%multiply
  %gathered = f32[32,4]{1,0} all-gather(%fusion.1), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %next = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) tuple(%i, %a, %b)
}

%goes_on (state: (s32[], f32[8,16], f32[16,4])) -> pred[] {
  %state = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(5)
  ROOT %compare = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (p: (s32[], f32[8,16], f32[16,4]), q: bf16[8,2]) -> f32[] {
  %p = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) parameter(0)
  %q = bf16[8,2]{1,0} parameter(1)
  %loop = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) while(%p), condition=%goes_on, body=%turn
  %counted = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) while(%p), condition=%goes_on, body=%turn, \
backend_config={"known_trip_count":{"n":"2"}}
  %sent = bf16[8,2]{1,0} collective-permute(%q), source_target_pairs={{0,1},{1,0}}
  %start = (bf16[8,2]{1,0}, bf16[8,2]{1,0}) all-reduce-start(%q, %sent), replica_groups={{0,1},{2,3}}, to_apply=%add
  %done = (bf16[8,2]{1,0}, bf16[8,2]{1,0}) all-reduce-done(%start)
  %alone = bf16[8,2]{1,0} all-reduce(%q), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %part = bf16[2,2]{1,0} reduce-scatter(%q), replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}, to_apply=%add
  %all = bf16[8,2]{1,0} all-to-all(%q), replica_groups={}, dimensions={0}
  %gemm = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%q, %q), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %zero = f32[] constant(0)
}
"""


def test_program_is_counted_with_its_loops():
    turns = 5 + 2
    assert count_work(PROGRAM) == Work(
        flops=turns * 2 * 8 * 4 * 16 + 2 * 8 * 8 * 2,
        count={
            "all-gather": turns,
            "collective-permute": 1,
            "all-reduce": 1,
            "reduce-scatter": 1,
            "all-to-all": 1,
        },
        sent={
            "all-gather": turns * 3 * 128,  # three times its own part, float32 [8, 4]
            "collective-permute": 32,
            "all-reduce": 2 * 64 / 2,  # of two arrays
            "reduce-scatter": 32 * 3 / 4,
            "all-to-all": 32 * 7 / 8,
        },
    )


def test_collective_in_several_fusions_is_counted_once():
    """On a TPU, three fusions start, continue and finish a collective. Also covers a sum of which
    each device keeps a part.
    """
    groups = "replica_groups={{0,1,2,3}}"
    gather = (
        f"%g = bf16[8,2]{{1,0}} all-gather(%p), {groups}, dimensions={{0}},"
        ' frontend_attributes={chain_id="0"}'
    )
    text = f"""HloModule example, num_partitions=4
%begin (p: bf16[2,2]) -> bf16[8,2] {{
  %p = bf16[2,2]{{1,0}} parameter(0)
  {gather}
  ROOT %c = bf16[8,2]{{1,0}} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%end (p: bf16[2,2]) -> bf16[8,2] {{
  %p = bf16[2,2]{{1,0}} parameter(0)
  {gather}
  ROOT %c = bf16[8,2]{{1,0}} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}}

%all-reduce-scatter.3 (p: f32[8,2]) -> f32[2,2] {{
  %p = f32[8,2]{{1,0}} parameter(0)
  %r = f32[8,2]{{1,0}} all-reduce(%p), {groups}, to_apply=%add
  ROOT %s = f32[2,2]{{1,0}} dynamic-slice(%r)
}}

ENTRY %main (p: bf16[2,2], q: f32[8,2]) -> f32[2,2] {{
  %p = bf16[2,2]{{1,0}} parameter(0)
  %q = f32[8,2]{{1,0}} parameter(1)
  %b = bf16[8,2]{{1,0}} fusion(%p), kind=kCustom, calls=%begin
  %e = bf16[8,2]{{1,0}} fusion(%p), kind=kCustom, calls=%end
  ROOT %k = f32[2,2]{{1,0}} fusion(%q), kind=kCustom, calls=%all-reduce-scatter.3
}}

%add (x: f32[], y: f32[]) -> f32[] {{
  ROOT %x = f32[] parameter(0)
}}
"""
    counted = count_work(text)
    assert counted == Work(
        count={"all-gather": 1, "reduce-scatter": 1},
        sent={"all-gather": 3 * 8, "reduce-scatter": 64 * 3 / 4},
    )


@pytest.mark.parametrize(("turns", "unknown"), [(6, 0), (None, 1)])
def test_compiled_loop(turns, unknown):
    """Covers a loop of six multiplications and a loop with a data-dependent end, compiled for this
    machine.
    """

    def times(x, w):
        if turns:
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=turns)[0]
        return jax.lax.while_loop(lambda x: jnp.sum(x) > x.shape[0], lambda x: jnp.tanh(x @ w), x)

    text = jax.jit(times).lower(jnp.ones((16, 32)), jnp.ones((32, 32))).compile().as_text()
    assert count_work(text) == Work(flops=(turns or 1) * 2 * 16 * 32 * 32, unknown_loops=unknown)
