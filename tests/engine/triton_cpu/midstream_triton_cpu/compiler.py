"""A Triton backend that is there, so that vLLM finds one, and compiles nothing: the interpreter
does the work.
"""

from triton.backends.compiler import BaseBackend, GPUTarget, Language


class CpuBackend(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "cpu-interpreter"

    def parse_options(self, options: dict) -> object:
        return options

    def add_stages(self, stages: dict, options: object, language: Language) -> None:
        raise RuntimeError("nothing is compiled here: set TRITON_INTERPRET=1")

    def load_dialects(self, context: object) -> None:
        return None

    def get_module_map(self) -> dict:
        return {}
