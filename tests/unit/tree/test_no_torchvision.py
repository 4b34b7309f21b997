"""The stand-in for torchvision: imports of names succeed, uses fail by name, and transformers does
not take it for torchvision.
"""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
    ),
]


def ran(code: str) -> str:
    """What the code prints in a process of its own: the stand-in stays where it is put."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_names_of_the_stand_in_import_and_fail_when_they_are_used() -> None:
    found = ran(
        """
        from midstream.workers.engine.no_torchvision import stand_in
        stand_in()
        from torchvision.transforms.v2 import functional as F
        def annotated(mode: F.InterpolationMode | None): ...
        try:
            F.resize(1)
        except ImportError as error:
            print(error)
        """
    )
    assert found == (
        "torchvision.transforms.v2.functional.resize is needed, but torchvision is not installed"
    )


@pytest.mark.long
def test_transformers_goes_on_with_its_processors_for_pil() -> None:
    found = ran(
        """
        from midstream.workers.engine.no_torchvision import stand_in
        stand_in()
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
        from transformers.utils import is_torchvision_available
        print(is_torchvision_available(), smart_resize(100, 100))
        """
    )
    assert found == "False (112, 112)"


@pytest.mark.long
def test_processes_that_vllm_starts_have_it_as_well() -> None:
    found = ran(
        """
        import subprocess, sys
        from midstream.workers.engine.no_torchvision import stand_in
        stand_in()
        stand_in()
        code = "; ".join([
            "from vllm.plugins import load_general_plugins", "load_general_plugins()",
            "import torchvision.io", "print(torchvision.io)",
        ])
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        print(done.stdout.strip().splitlines()[-1])
        """
    )
    assert "torchvision.io" in found


@pytest.mark.matrix
def test_processes_that_multiprocessing_spawns_have_it_as_well(tmp_path: Path) -> None:
    """They take over the path of the process that spawns them, and not `PYTHONPATH`."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing

            def look():
                from vllm.plugins import load_general_plugins
                load_general_plugins()
                import torchvision.io

            if __name__ == "__main__":
                from midstream.workers.engine.no_torchvision import stand_in
                stand_in()
                child = multiprocessing.get_context("spawn").Process(target=look)
                child.start()
                child.join()
                print(child.exitcode)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip().splitlines()[-1:] == ["0"], done.stderr[-2000:]
