"""What morphs leave behind in the processes of workers: nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tests.runtime.worker_crew import Crew, Footprint, poll_until


def check_that_morphs_leave_nothing(crew: Crew, names: Sequence[str]) -> None:
    """Twenty morphs of four workers leave no thread and no open file in their processes that four have not."""
    shapes = ("2x2", "1x3", "4x1", "1x2")

    def footprints() -> list[Footprint]:
        return [member.control("footprint") for member in crew.members.values()]

    def morph(times: int) -> None:
        for index in range(times):
            crew.reshape(shapes[index % len(shapes)], names)
            crew.train(crew.version + 1)

    def no_more_than(before: list[Footprint]) -> bool:
        return all(
            now.num_threads <= then.num_threads and now.num_descriptors <= then.num_descriptors
            for now, then in zip(footprints(), before, strict=True)
        )

    def let_go() -> None:
        for name in names:  # a generation of one has no groups: the old ones are closed
            crew.begin()
            crew.reshape("1x1", [name])

    morph(len(shapes))
    let_go()
    settled: list[list[Footprint]] = []

    def settles() -> bool:
        settled.append(footprints())
        return len(settled) > 20 and all(entry == settled[-1] for entry in settled[-20:])

    poll_until(settles, "the groups of the first morphs to be closed")
    crew.begin()
    morph(20)
    let_go()
    poll_until(lambda: no_more_than(settled[-1]), f"threads and files to go down to {settled[-1]}")
