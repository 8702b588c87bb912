"""The stories of the made world: kinds of story, their sentences, and the sentences that do not matter."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Hana", "Ivan", "Julia", "Leo", "Mia", "Noah")

IDLE = (
    "The way there takes {x} minutes.",
    "It is day {x} of the year.",
    "The house next door has {x} windows.",
    "Page {x} of the newspaper is missing.",
)
"""Sentences whose number changes nothing."""

IDLE_OF_PEOPLE = ("{n} is {x} years old.", "{n} lives at number {x}.")


@dataclass(frozen=True)
class Kind:
    """One kind of story. {n} and {m} are owners, {i} the items, {a}, {b} and {k} numbers."""

    name: str
    items: tuple[str, ...]
    gain: tuple[str, ...]
    lose: tuple[str, ...]
    grow: tuple[str, ...]
    share: tuple[str, ...]
    packs: tuple[str, ...] = ("{n} has {a} bags with {k} {i} each.", "{n} has {a} boxes of {k} {i}.")
    has: tuple[str, ...] = ("{n} has {a} {i}.", "{n} starts with {a} {i}.")
    owners: tuple[str, ...] = ()
    question: str = "How many {i} does {n} have now?"
    total: str = "How many {i} do they have together?"
    difference: str = "How many more {i} does {n} have than {m}?"

    @property
    def idle(self) -> tuple[str, ...]:
        return IDLE if self.owners else (*IDLE, *IDLE_OF_PEOPLE)

    @property
    def events(self) -> dict[str, tuple[str, ...]]:
        return {"add": self.gain, "subtract": self.lose, "multiply": self.grow, "divide": self.share}

    @property
    def comparisons(self) -> dict[str, tuple[str, ...]]:
        return {
            "add": ("Compared with {m} now, {n} has {b} more {i}.",),
            "subtract": ("Compared with {m} now, {n} has {b} fewer {i}.",),
            "multiply": ("Compared with {m} now, {n} has {b} times as many {i}.",),
            "divide": ("{n} has so many {i} that {m} now has {b} times as many.",),
        }


KINDS = (
    Kind(
        "collection",
        ("shells", "stamps", "marbles", "cards"),
        gain=("{n} finds {b} more {i}.", "A friend gives {n} {b} {i}."),
        lose=("{n} loses {b} {i}.", "{n} gives away {b} {i}."),
        grow=("{n} trades until there are {b} times as many {i}.",),
        share=("{n} splits the {i} evenly into {b} piles and keeps one pile.",),
    ),
    Kind(
        "market",
        ("apples", "pears", "eggs", "plums"),
        gain=("{n} picks {b} more {i}.", "{n} buys {b} {i}."),
        lose=("{n} sells {b} {i}.", "{n} throws away {b} bad {i}."),
        grow=("A delivery brings {n} to {b} times as many {i}.",),
        share=("{n} sorts the {i} evenly into {b} crates and keeps one crate.",),
    ),
    Kind(
        "bakery",
        ("buns", "rolls", "cakes"),
        gain=("{n} bakes {b} more {i}.",),
        lose=("{n} sells {b} {i}.", "{n} eats {b} {i}."),
        grow=("{n} bakes on until there are {b} times as many {i}.",),
        share=("{n} packs the {i} evenly into {b} boxes and keeps one box.",),
    ),
    Kind(
        "library",
        ("books", "maps", "comics"),
        gain=("{n} borrows {b} more {i}.", "{n} buys {b} {i}."),
        lose=("{n} returns {b} {i}.", "{n} lends out {b} {i}."),
        grow=("{n} collects until there are {b} times as many {i}.",),
        share=("{n} puts the {i} evenly on {b} shelves and keeps one shelf.",),
    ),
    Kind(
        "savings",
        ("coins", "dollars"),
        gain=("{n} earns {b} more {i}.", "{n} wins {b} {i}."),
        lose=("{n} spends {b} {i}.", "{n} pays {b} {i} for lunch."),
        grow=("{n} saves until there are {b} times as many {i}.",),
        share=("{n} shares the {i} evenly among {b} people and keeps one share.",),
    ),
    Kind(
        "garden",
        ("tulips", "roses", "trees"),
        gain=("{n} plants {b} more {i}.",),
        lose=("{n} cuts down {b} {i}.", "{n} gives away {b} {i}."),
        grow=("{n} plants on until there are {b} times as many {i}.",),
        share=("{n} divides the {i} evenly among {b} fields and keeps one field.",),
        packs=("{n} has {a} rows with {k} {i} each.", "{n} has {a} beds of {k} {i}."),
    ),
    Kind(
        "bus",
        ("people", "children"),
        gain=("{n} takes on {b} more {i}.",),
        lose=("{n} lets off {b} {i}.",),
        grow=("At a fair {n} fills up to {b} times as many {i}.",),
        share=("The {i} on {n} form {b} equal groups and one group stays.",),
        packs=("{n} takes on {a} groups of {k} {i}.",),
        has=("{n} carries {a} {i}.",),
        owners=("the red bus", "the blue bus", "the green bus", "the white bus"),
        question="How many {i} are on {n} now?",
        total="How many {i} are on them together?",
        difference="How many more {i} are on {n} than on {m}?",
    ),
    Kind(
        "workshop",
        ("screws", "nails", "bolts"),
        gain=("{n} orders {b} more {i}.", "{n} finds {b} {i}."),
        lose=("{n} uses {b} {i}.", "{n} drops {b} {i}."),
        grow=("{n} makes {i} until there are {b} times as many.",),
        share=("{n} sorts the {i} evenly into {b} drawers and keeps one drawer.",),
    ),
)
