"""The page of a run with rewards."""

import json

from dantinox.report.reward_page import reward_page


def sample(prompt, answer, reward):
    return (
        json.dumps(
            {
                "prompt": prompt,
                "answer": answer,
                "reward": reward,
                "rewards": {"exact_match": reward},
            }
        )
        + "\n"
    )


def test_page_shows_curves_and_escaped_answers():
    rows = [
        {"kind": "interval", "step": 5, "reward": 0.25},
        {"kind": "interval", "step": 10, "reward": 0.75},
    ]
    rows += [
        {"kind": "evaluation", "step": 10, "val_reward": 0.5},
        {"kind": "interval", "step": 10, "reward": None},
    ]
    page = reward_page(
        rows,
        {5: sample("1+1=", "<script>3", 0), 10: sample("1+1=", "2", 1) + sample("1+1=", "11", 0)},
    )
    assert (
        'points="360.0,200.0 680.0,40.0"' in page and 'points="680.0,120.0"' in page
    )  # 320 pixels per 5 steps
    assert "&lt;script&gt;3" in page and "<script" not in page
    assert (
        page.index("Step 10") < page.index("Step 5")
        and page.count("1+1=") == 2
        and page.count("<details open>") == 1
    )


def test_page_without_rewards():
    assert "No rewards yet." in reward_page([], {1: sample("a", "b", float("0.5"))})
