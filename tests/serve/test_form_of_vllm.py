"""The answers of a server against the recorded ones of vLLM."""

import pytest

from jaxmem.serve import command
from tests.helpers import engine_conversation, served
from tests.helpers.vllm_server import write_adapter, write_checkpoint

pytestmark = pytest.mark.usefixtures("quick_compilation")
_OWN = [
    "POST /no/route 404: error is not in vLLM's answer",  # as all other errors have
    # vLLM states versions in its other route only.
    *(
        f"POST /v1/completions: choices.{i}.weight_versions is not in vLLM's answer"
        for i in range(3)
    ),
]


@pytest.mark.full
def test_answers_have_the_form_of_vllm(tmp_path):
    base = write_checkpoint(tmp_path / "base")
    for version in (1, 2):
        write_checkpoint(tmp_path / f"v{version:06d}", seed=version)
    for version in (3, 4):
        write_adapter(tmp_path / f"v{version:06d}", base, seed=version)
    options = served.options(base, max_len=256, slots=3, weights=(str(tmp_path),))
    with command.served(options) as server:
        lines = engine_conversation.differences(
            server.url, tmp_path, without=("aborted", "broken")
        )
    assert lines == _OWN
