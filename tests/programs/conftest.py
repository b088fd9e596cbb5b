"""What tests of programs share: the same steps by a program and in chunks."""

import pytest


@pytest.fixture
def both(make, monkeypatch):
    """Runs f(table) on a table that runs programs and on one that is updated in chunks."""
    import kvjax  # which has to be told the backend first
    from kvjax._training import apply as training
    from kvjax._training.update import lowered

    def run(f, **options):
        results = []
        for way in (lowered, lambda *_: None):
            monkeypatch.setattr(training, "lowered", way)
            results.append(f(make(seed=1, initializer=kvjax.initializers.normal(0.5), **options)))
        return results

    return run
