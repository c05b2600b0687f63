"""GBNF: the meaning of llama.cpp's grammar language, greedy terminals, and messages that name the
line of the user.
"""

import pytest

pytest.importorskip("llguidance")

from dantinox.config import UserError
from dantinox.generation.guides import gbnf
from dantinox.generation.guides.constraints import Constraint, check_constraint
from dantinox.generation.guides.gbnf import gbnf_to_lark

from .texts_of import COMPILER, allows

# The JSON grammar of llama.cpp, in its essentials.
JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws # with escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws

ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("source", "inside", "outside"),
    [
        ("root ::= .*", ["", "a\nb", "é"], []),
        ("root ::= [a-z&&m]{5}", ["ab&mz"], ["ABCDE", "mmmm"]),
        ("root ::= [[x]", ["[", "x"], ["]"]),
        ("root ::= [^a]", ["b", "\n", "😀"], ["a", ""]),
        (r'root ::= "\x41\u00e9\U0001F600" [\]\[^-]', ["Aé😀]", "Aé😀^", "Aé😀-"], ["Aé😀a"]),
        ('root ::= ("a"*)*', ["", "aaa"], ["b"]),
        ("root ::= ([a-z]+)?", ["", "abc"], ["A"]),
        ('root ::= start\nstart ::= "a" start | "b"', ["aab", "b"], ["a"]),
        ('root ::= "a" e "b"\ne ::=', ["ab"], ["a"]),
        ('e ::=\nroot ::= "a" e "b"', ["ab"], ["a"]),
        ('root ::= "a" |', ["a", ""], ["b"]),
        ('root ::= (\n "a" |\n "b" # or\n){2,3}', ["ab", "bab"], ["a", "abab"]),
        ('# c\nroot ::= x-1 # d\n\nx-1 ::= "c" |\n  "d"\n', ["c", "d"], ["x"]),
        ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
        ('root ::= root "a" | ""', ["", "aa"], ["b"]),
        ('root ::= "x" root "y" | none | ""\nnone ::= "z" none', ["", "xy", "xxyy"], ["z", "x"]),
        # greedy terminals
        ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab"]),
        ('root ::= [a-z]* "a"', ["a", "aaa", "ba"], ["bb"]),
        (
            'root ::= item root | item\nitem ::= "if" | [a-z] "x"? ";"?',
            ["i", "iff", "ix;if"],
            ["I"],
        ),
        (
            'root ::= "(" root ")" | [a-z]* "a" | "ab" root "c"',
            ["(aaa)", "abac", "ab(a)c"],
            ["b", "("],
        ),
        ('root ::= a b\na ::= "x" a | ""\nb ::= "x" b "y" | ""', ["xx", "xxxy"], ["y", "xyy"]),
        (
            JSON,
            ['{"a": [1, 2.5e3, {"b": null}], "c": "x\\n\\u00e9"}', '{ "a":"" }', "{}\n "],
            ['{"a": [1,]}', "[]", '{"a" 1}'],
        ),
    ],
)
def test_languages(source, inside, outside):
    matcher = COMPILER.matcher("gbnf", source)
    assert [text for text in inside + outside if allows(matcher, text)] == inside


def test_terminals_of_an_unambiguous_grammar_are_not_split():
    """With a terminal per character, masks of large vocabularies would be slow."""
    assert gbnf_to_lark(JSON).count("\nT") < 12


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('root ::= "a"\n\nx ::= "b" ]', "in line 3: unexpected ']'"),
        ('root ::= "a" | y\n  | "b"', "in line 2: a rule such as `name ::= …` is expected"),
        ('\nroot ::= "a\n\n', 'in line 2: " has no " after it'),
        ('x ::= "a"\nroot ::= [a\n', "in line 2: [ has no ] after it"),
        ('root ::= ("a"\n\n', "in line 1: a group has no closing parenthesis"),
        ('root ::= "a"\nx ::= "\\q"', "in line 2: \\q is not an escape"),
        ('root ::= "a"{,3}', "in line 1: a repetition must be {n}, {n,} or {n,m}"),
        ('root ::= "a"{3,2}', "in line 1: the repetition {3,2} is out of order"),
        ("root ::= [z-a]", "in line 1: the range z-a is out of order"),
        ("root ::= []", "in line 1: a character class is empty"),
        ('root = "a"', "in line 1: a rule such as"),
        ('root ::= "a"\nx ::= y\n', "in line 2: rule 'y' is not defined"),
        ("", "there is no rule root"),
        ('root ::= "a" root', "no text satisfies it"),
        (
            "\n".join(
                [
                    'root ::= "(" root ")" | x30',
                    *(f"x{n} ::= x{n - 1} x{n - 1}" for n in range(1, 31)),
                    "x0 ::= [a-z]?",
                ]
            ),
            "too long",
        ),
    ],
)
def test_messages(source, says):
    with pytest.raises(UserError) as caught:
        check_constraint(Constraint("gbnf", source))
    assert (
        says in str(caught.value)
        and "\n" not in str(caught.value)
        and "ark" not in str(caught.value)
    )


def test_a_special_token():
    assert "<[5]>" in gbnf_to_lark('root ::= <[5]> "a" | <think>') and "<think>" in gbnf_to_lark(
        "root ::= <think>"
    )


def doubling(first, rest):
    """Returns a grammar whose rules refer to the next one twice: with a copy per reference, it has
    64 times its size.
    """
    middle = "".join(f"a{number} ::= {rest.format(number + 1)}\n" for number in range(6))
    return f'root ::= {first}\n{middle}a6 ::= "x"?\n'


def test_the_size_of_the_conversion_is_bounded(monkeypatch):
    assert len(gbnf_to_lark(doubling("a0* b", 'a{0} a{0} | "v"') + 'b ::= "x" b "q" | ""\n')) < 300
    monkeypatch.setattr(gbnf, "MAX_WORK", 30_000)
    with pytest.raises(UserError, match="it takes too long to evaluate"):
        gbnf_to_lark(doubling("a0", "a{0} a{0}?"))
