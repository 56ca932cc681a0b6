"""Let pytest spend less of the processor on itself: it seldom looks for garbage, and begins the longest modules first."""

import gc

gc.set_threshold(20_000, 20, 20)

LONGEST = (
    "tests/runs/test_workers.py",
    "tests/runs/test_anytime_ranks.py",
    "tests/test_scripts.py",
    "tests/test_cli_resume.py",
    "tests/runs/test_grow_workers.py",
    "tests/test_examples.py",
    "tests/test_second_signal.py",
    "tests/tolaria/test_slots_around.py",
    "tests/test_printing_pages.py",
    "tests/lab/test_ladder.py",  # these three in bench/
    "tests/lab/test_learning.py",
    "tests/test_leaderboard.py",
    "tests/third_party/test_export_targets.py",
    "tests/third_party/test_clusters.py",
    "tests/third_party/test_compiled.py",
    "tests/third_party/test_lightning.py",
    "tests/third_party/test_hugging_face.py",
    "tests/runs/test_resume.py",
    "tests/runs/test_train.py",
    "tests/runs/test_healing.py",
    "tests/test_readme.py",
    "tests/tolaria/test_population_widening.py",
    "tests/tolaria/test_reading.py",
    "tests/runs/test_growth_hosts.py",
    "tests/kasmina/test_export.py",
    "tests/tasks/test_images.py",
    "tests/runs/test_estimators.py",
    "tests/test_cli.py",
    "tests/simic/test_ppo.py",
)
"""Modules of 10 to 200 s. A worker has a whole module at a time, so that one which begins last leaves the others idle."""


COMPILING = (
    "tests/runs/test_anytime_growth.py",
    "tests/runs/test_growth.py",
    "tests/kasmina/test_grafted.py",
    "tests/runs/test_growth_compiled.py",
    "tests/runs/test_growth_freeze.py",
)
"""Modules of `make test` that call torch.compile: from then on it keeps a list of every module that is made, which takes long."""


LAST = "tests/runs/test_anytime_sharded.py"
"""Leaves its process in a state in which no thread can fork it."""


def pytest_collection_modifyitems(items):
    rank = {path: number for number, path in enumerate((*LONGEST, None, *COMPILING, LAST))}

    def place(item):
        path = item.nodeid.partition("::")[0]
        early = path in COMPILING and item.get_closest_marker("campaign")
        return rank[None] if early else rank.get(path, rank[None])

    items.sort(key=place)


def pytest_collection_finish():
    """Keep the objects of all imports. To look through them again and again for garbage took a twelfth of the time."""
    gc.collect()
    gc.freeze()
