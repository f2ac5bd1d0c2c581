from treeward import tables as results
from treeward.tables import Column, markdown_table, results_table

ROWS = [
    {"set": "plain", "pairs": 1200, "accuracy": 0.9125, "loss": 0.25},
    {"set": "length-controlled", "pairs": 800, "accuracy": 0.84, "loss": None},
]


def test_the_table_of_the_module_docstring():
    table = results_table(ROWS, ["set", "pairs", Column("accuracy", format="percent")])
    assert table == "\n".join(
        [
            "set                pairs  accuracy",
            "─────────────────  ─────  ────────",
            "plain              1,200     91.2%",
            "length-controlled    800     84.0%",
        ]
    )
    assert all(f"    {line}\n" in str(results.__doc__) for line in table.splitlines())


def test_cells_cannot_move_the_cursor_or_break_the_line():
    table = results_table([{"name": "a\nb\x1b[31m\u202e|c"}], ["name"])
    assert table.splitlines()[2] == "a b[31m|c"


def test_markdown():
    assert markdown_table(
        [{"set": "a|b", "accuracy": 0.5}, {"set": "c\nd"}], ["set", "accuracy"]
    ).splitlines() == [
        "| set | accuracy |",
        "| :--- | ---: |",
        "| a\\|b | 0.5 |",
        "| c d | – |",
    ]
