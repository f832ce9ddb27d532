"""Records a conversation of the client with a real vLLM server as `RECORD`.

$JAXMEM_VLLM is the path of vLLM's program, as `.ci/engine` installs it. Run from the
repository, whenever the client asks for other things:

    JAXMEM_VLLM=.../bin/vllm python -m tests.train.jobs.engines.record_vllm

Each line is a request with its answer, or the client's result of a step.
"""

import json
import pathlib
import tempfile

from tests.helpers.engine_conversation import (
    RECORD,
    STEPS,
    Conversation,
    Listener,
)
from tests.helpers.vllm_server import (
    ADAPTERS,
    PROCESSED,
    VllmServer,
    write_adapter,
    write_checkpoint,
)


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        base = write_checkpoint(folder / "base")
        for version in (1, 2):
            write_checkpoint(folder / f"v{version:06d}", seed=version)
        for version in (3, 4):
            write_adapter(folder / f"v{version:06d}", base, seed=version)
        flags = *PROCESSED, *ADAPTERS
        with (
            VllmServer(base, folder / "log", flags) as server,
            Listener(server.url, folder) as listener,
        ):

            def began(step):
                listener.step = step

            conversation = Conversation(listener.url, folder, began)
            conversation.completions()  # the first request takes seconds
            listener.exchanges.clear()
            results = conversation.run(STEPS)
    lines = [
        *listener.exchanges,
        *({"step": step, "result": result} for step, result in results.items()),
    ]
    RECORD.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{RECORD}: {len(listener.exchanges)} requests, {len(results)} steps")


if __name__ == "__main__":
    main()
