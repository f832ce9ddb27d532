"""Contents of `jaxmem.report`, and its reasons where it lists nothing."""

import threading

import jax
import jax.numpy as jnp

import jaxmem

HEAD = jnp.ones((6, 8)), jnp.ones((40, 8)), jnp.arange(6)


def test_report_of_call_and_its_logits():
    with jaxmem.report() as calls:
        jaxmem.logprobs(*HEAD, chunk=4)
    (call,) = calls.calls
    assert (call.verb, call.implementation, call.live_logits_bytes) == (
        "logprobs", "xla", 4 * call.chunk * 40,
    )  # fmt: skip
    assert str(calls).startswith("logprobs(hidden[6, 8] W[40, 8]): xla (")
    assert str(calls).endswith(f"chunk={call.chunk}, 0.0 MiB of logits")


def test_reports_inside_one_another_list_the_same_call():
    with jaxmem.report() as outer:
        with jaxmem.report() as inner:
            jaxmem.logprobs(*HEAD)
        jaxmem.entropy(*HEAD[:2])
    assert [call.verb for call in inner.calls] == ["logprobs"]
    assert [call.verb for call in outer.calls] == ["logprobs", "entropy"]


def test_nothing_traced_says_why_and_what_to_do():
    run = jax.jit(jaxmem.logprobs)
    run(*HEAD)
    with jaxmem.report() as calls:
        run(*HEAD)
    assert not calls.calls
    assert "jax.jit had compiled it before this block" in str(calls)
    assert "call jax.clear_caches() before it" in str(calls)
    jax.clear_caches()
    with jaxmem.report() as calls:
        run(*HEAD)
    assert len(calls.calls) == 1


def in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_report_lists_calls_of_other_threads():
    with jaxmem.report() as calls:
        in_thread(lambda: jaxmem.logprobs(*HEAD))
    assert [call.verb for call in calls.calls] == ["logprobs"]


def test_reports_of_two_threads_may_close_in_any_order():
    opened, closed, reports = threading.Event(), threading.Event(), []

    def other():
        with jaxmem.report() as calls:
            opened.set()
            closed.wait(10)
            jaxmem.entropy(*HEAD[:2])
        reports.append(calls)

    thread = threading.Thread(target=other)
    with jaxmem.report() as calls:
        thread.start()
        assert opened.wait(10)
        jaxmem.logprobs(*HEAD)
    closed.set()
    thread.join()
    jaxmem.topk(*HEAD[:2], 1)
    assert [call.verb for call in calls.calls] == ["logprobs"]
    assert [call.verb for call in reports[0].calls] == ["logprobs", "entropy"]


def test_report_of_nothing_names_threads():
    with jaxmem.report() as calls:
        pass
    assert "in any thread" in str(calls)
