"""Values made or copied without validation equal validated ones, also in their serialised form."""

from __future__ import annotations

import json
from functools import cached_property

import pytest
from pydantic import Field, ValidationError

from manager.controller.state.events import WorkerLost
from manager.journal.records import Fact
from morph.contract.base import Value
from morph.contract.errors import printable
from morph.contract.messages import Failed
from morph.contract.vm_names import beside, is_name, vm_of, workers_of


class Basket(Value):
    """Fields with and without defaults, and one with a default factory."""

    owner: str
    num: int = Field(default=1, ge=1)
    fruits: dict[str, int] = Field(default_factory=dict)
    label: str | None = None

    @cached_property
    def heavy(self) -> int:
        return 1000 * self.num


def test_an_unchecked_value_of_checked_parts_equals_a_checked_one() -> None:
    checked, made = Basket(label="b", owner="a"), Basket.model_construct(label="b", owner="a")
    assert made == checked
    assert made.model_dump_json() == checked.model_dump_json()
    assert made.model_dump(exclude_unset=True) == checked.model_dump(exclude_unset=True) == {"owner": "a", "label": "b"}
    assert Basket.model_construct(owner="a").fruits is not made.fruits
    with pytest.raises(ValidationError):
        made.num = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain, é\tand\nlines", "plain, é\tand\nlines"),
        ("\x1b]52;c;ZXZpbA==\x07", r"\x1b]52;c;ZXZpbA==\x07"),
        ("\x1b[2J\x1b[H\rgone\x9b2J", r"\x1b[2J\x1b[H\rgone\x9b2J"),
        ("\u202eexe.txt", r"\u202eexe.txt"),
    ],
)
def test_control_characters_are_shown_escaped(said: str, shown: str) -> None:
    assert printable(said) == shown
    for value in (Fact(name="a", detail=said), Fact.model_validate_json(json.dumps({"name": "a", "detail": said}))):
        assert value.detail == shown
    assert WorkerLost(worker="n1", cause=said).cause == shown
    failed = Failed(worker="n1", generation=1, error=said, detail=said, traceback=said)
    assert {failed.error, failed.detail, failed.traceback} == {shown}


def test_a_vm_has_a_name_that_can_be_shown() -> None:
    assert all(map(is_name, ("job-1-0", "n1", "i-0abc.2", "_x")))
    assert not any(map(is_name, ("", "a b", "a\n", "\x1b[2J", "é", "x" * 301, "a/b")))


def test_a_value_is_not_made_without_a_field_that_has_no_default() -> None:
    with pytest.raises(TypeError, match="Basket lacks owner"):
        Basket.model_construct(num=2)  # type: ignore[call-arg]


def test_many_values_are_made_that_differ_in_one_field() -> None:
    assert Basket.each("owner", ["a", "b"], num=3) == [Basket(owner="a", num=3), Basket(owner="b", num=3)]
    assert Basket.each("owner", []) == []


def test_a_copy_leaves_behind_what_was_worked_out_of_other_fields() -> None:
    basket = Basket(owner="a", num=2)
    assert basket.heavy == 2000
    changed = basket.model_copy(update={"num": 3})
    assert (changed.heavy, basket.heavy) == (3000, 2000)
    assert changed == Basket(owner="a", num=3)
    assert basket.model_copy() == basket


def test_a_copy_keeps_the_set_fields_and_a_deep_one_shares_nothing() -> None:
    basket = Basket(owner="a", fruits={"apple": 1})
    assert basket.model_copy(update={"label": "b"}).model_dump(exclude_unset=True) == {
        "owner": "a",
        "fruits": {"apple": 1},
        "label": "b",
    }
    assert basket.model_copy().fruits is basket.fruits
    assert basket.model_copy(deep=True).fruits is not basket.fruits


def test_a_vms_only_worker_has_its_name_and_several_are_numbered() -> None:
    assert workers_of("job-1-0", 1) == ("job-1-0",)
    assert workers_of("job-1-0", 3) == ("job-1-0.d0", "job-1-0.d1", "job-1-0.d2")


@pytest.mark.parametrize("num_devices", [1, 2, 12])
@pytest.mark.parametrize("vm", ["vm0", "job-1-0", "x-d0", "vm0.2"])
def test_every_workers_name_contains_its_vm(vm: str, num_devices: int) -> None:
    workers = workers_of(vm, num_devices)
    assert len(set(workers)) == num_devices
    assert {vm_of(worker) for worker in workers} == {vm}


def test_a_local_vm_that_came_back_is_another_vm() -> None:
    assert vm_of("vm0.2") == "vm0.2"
    assert beside("vm0", ["vm0", "vm0.2", "vm0.d1"]) == ()


def test_beside_a_worker_are_the_others_of_its_vm() -> None:
    assert beside("a.d1", ["b.d0", "a.d0", "a.d1", "a.d11", "ab.d0"]) == ("a.d0", "a.d11")
