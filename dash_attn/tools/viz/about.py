"""One sentence about each policy, and the section of docs/tour.md that explains it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dash_attn.order import parse

REPOSITORY = Path(__file__).resolve().parents[3]
TOUR = Path("docs") / "tour.md"


@dataclass(frozen=True)
class About:
    """A policy in one sentence. `anchor` names a heading of the tour."""

    sentence: str
    anchor: str


ABOUT = {
    "auto": About("Picks a policy for each sequence, from that sequence alone.", "policies"),
    "fa3": About(
        "The paper's baseline: every chain climbs from its first q tile, and kv tile 0 adds to each dQ tile first.",
        "fa3",
    ),
    "spt": About(
        "The shortest chain starts first and every chain climbs from its diagonal, so each chain adds first where it "
        "begins.",
        "spt-and-diagonal",
    ),
    "descending": About(
        "The turns of fa3, but every chain comes down from the last q tile, so short chains end early and make room.",
        "descending",
    ),
    "shift": About(
        "Chain i starts at q tile i and wraps around, so at every step each q tile has one visitor and no turn waits.",
        "shift",
    ),
    "symmetric_shift": About(
        "A worker runs a long chain, then the short chain that completes it; no two workers visit one q tile at the "
        "same step.",
        "symmetric_shift",
    ),
    "diagonal": About(
        "The order of spt with the longest chains launched first, which balances better but needs its chains resident "
        "together.",
        "spt-and-diagonal",
    ),
    "level": About(
        "The order of spt, but in the last heads the longest chain starts first and comes down, so all workers end "
        "together.",
        "level",
    ),
    "fold": About(
        "Rounds of short chains, each followed by as many long ones, so that all workers end a round together.",
        "fold",
    ),
    "search": About(
        "Found by list scheduling: each chain takes next the q tile that is free soonest, and turns follow that time.",
        "search-and-the-exact-solver",
    ),
}


def about(policies: str) -> dict[str, About]:
    """What is known of a policy, or of the policies of a pack ('spt@head, shift:16'), by the name of each.

    A width, or what follows '@', makes no difference.
    """
    names = dict.fromkeys(map(_name, policies.split(", ")))
    return {name: ABOUT[name] for name in names if name in ABOUT}


def _name(text: str) -> str:
    try:
        return parse(text).policy
    except ValueError:  # a chart can have an order of somebody else, under any name
        return text


def tour_link(anchor: str, page: Path) -> str | None:
    """A link from a page to a heading of the tour, relative. None if the page lies outside the repository."""
    folder = page.resolve().parent
    if not (REPOSITORY / TOUR).is_file() or not folder.is_relative_to(REPOSITORY):
        return None
    up = "../" * len(folder.relative_to(REPOSITORY).parts)
    return f"{up}{TOUR.as_posix()}#{anchor}"
