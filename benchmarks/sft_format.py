"""Measures whether fine-tuning teaches a response format, on greedy answers to held-out questions
of `builtin:instructions`.

    python train.py --config configs/quickstart.yaml --run_dir runs/quickstart
    python train.py --config configs/sft.yaml --run_dir runs/sft
    python benchmarks/sft_format.py runs/quickstart runs/sft

For each run, the last command prints two of the answers, and how many of all answers match the
format `dantinox.text.builtin_instructions.ANSWER`. The prompts of all runs use the chat template of
the last run.
"""

from common import Parser, random_run

import dantinox
from dantinox.config import DataSection
from dantinox.run import RunDirectory
from dantinox.text import ChatTemplate, Corpus
from dantinox.text.builtin_instructions import matches_answer_form
from dantinox.text.conversations import Conversations


def held_out_questions() -> list[str]:
    """Returns the questions that configs/sft.yaml holds out for validation."""
    corpora = (Corpus.open("builtin:instructions"),)
    found = Conversations.scan(corpora, DataSection(val_fraction=0.2))
    records = [record for _, record in corpora[0].records()]
    return [record["messages"][0]["content"] for record in records[found.val_starts[0] :]]


def main() -> None:
    parser = Parser(__doc__, smoke={"questions": 2})
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument(
        "--questions", type=int, help="use only the first N questions (default: all)"
    )
    options = parser.parse_args()
    paths = options.runs or ([random_run(chat_template="plain")] if options.smoke else [])
    parser.require(RUN=paths or None)
    questions = held_out_questions()[: options.questions]
    source = RunDirectory(paths[-1]).chat_template
    for path in paths:
        run = dantinox.load(path)
        template = ChatTemplate.load(source, run.tokenizer)
        asked = {
            q: template.encode([{"role": "user", "content": q}], generation_prompt=True)
            for q in questions
        }
        run.prompt_ids = asked.__getitem__  # type: ignore[method-assign]  # a prompt with special tokens in it
        answers = [
            result.text for result in run.generate(questions, greedy=True, max_new_tokens=64)
        ]
        right = sum(map(matches_answer_form, answers))
        print(
            f"{path}: {right} of {len(answers)} answers have the format"
            f" ({right / len(answers):.0%})"
        )
        for question, answer in list(zip(questions, answers, strict=True))[:2]:
            print(f"  {question}\n    {answer!r}")


if __name__ == "__main__":
    main()
