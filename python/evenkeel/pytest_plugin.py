"""A pytest plugin: `pytest -p evenkeel.pytest_plugin`, or in conftest.py `pytest_plugins = ["evenkeel.pytest_plugin"]`.

    def test_my_kernel(evenkeel_conform):
        evenkeel_conform(my_attention, device="cuda")

The fixture judges the function as evenkeel.conform does and fails with its report. With `--evenkeel-quick` a first verdict
comes in seconds. With `--evenkeel-failing FOLDER` the smallest failing form of each test is a file there."""
import pathlib

import pytest


def pytest_addoption(parser):
    group = parser.getgroup("evenkeel")
    group.addoption("--evenkeel-quick", action="store_true", help="conform: fewer forms and families")
    group.addoption("--evenkeel-failing", metavar="FOLDER", help="conform: the smallest failing form of each test")


@pytest.fixture
def evenkeel_conform(request):
    import evenkeel

    def judge(fn, **options):
        options.setdefault("quick", request.config.getoption("--evenkeel-quick"))
        folder = request.config.getoption("--evenkeel-failing")
        if folder:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
            options.setdefault("failing", pathlib.Path(folder) / (request.node.name + ".safetensors"))
        report = evenkeel.conform(fn, **options)
        if not report.passes:
            pytest.fail(str(report), pytrace=False)
        return report

    return judge
