"""Subtitles as text: what is spoken, without numbers and times."""

from __future__ import annotations

import re
from html import unescape

_TIMES = re.compile(r"\s*(?:\d+:)?\d{1,2}:\d{2}(?:[.,]\d{1,3})?\s*-->")
_TAG = re.compile(
    r"</?(?:[ibusc]|ruby|rt)(?:\.[^<>\s]{0,200})?/?>|</?(?:v|lang|font)(?:[.\s][^<>]{0,200})?>"
    r"|<\d[\d:.]*>|\{\\[^{}]{0,200}\}",
    re.IGNORECASE,
)
_WORD_TIMES = re.compile(r"<\d+:\d\d[\d:.]*>")
_VTT = re.compile(r"WEBVTT(?:\s|$)")
_VTT_BLOCK = re.compile(r"(?:NOTE|STYLE|REGION)(?:\s|$)")


def spoken_text(text: str) -> str:
    """Return the lines of the cues of SubRip or WebVTT.

    In captions that roll up, whose words have times of their own, lines that the previous cue had
    are left out.
    """
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    is_vtt = _VTT.match(lines[0]) is not None
    rolls_up = is_vtt and _WORD_TIMES.search(text) is not None
    spoken, previous = list[str](), list[str]()
    for cue in _cues(lines, is_vtt):
        clean = [" ".join(_TAG.sub("", line).split()) for line in cue]
        clean = [unescape(line) if is_vtt else line for line in clean if line]
        spoken += [line for line in clean if not (rolls_up and line in previous)]
        previous = clean
    return "\n".join(spoken)


def _cues(lines: list[str], is_vtt: bool) -> list[list[str]]:
    """Return the lines of each cue; text before the first times is a cue in SubRip only."""
    names = _name_lines(lines, is_vtt)
    cues: list[list[str]] = [[]]
    is_skipped = is_vtt  # the header
    for index, line in enumerate(lines):
        if _TIMES.match(line):
            is_skipped = False
            cues.append([])
        elif is_vtt and _VTT_BLOCK.match(line) and not lines[index - 1].strip():
            is_skipped = True
        elif not is_skipped and index not in names:
            cues[-1].append(line)
    return cues


def _name_lines(lines: list[str], is_vtt: bool) -> set[int]:
    """Return the indices of lines that number a cue, or name it: those before its times."""
    names = set[int]()
    last = -1  # index of the last line that is not blank
    cues = 0
    for index, line in enumerate(lines):
        if _TIMES.match(line):
            cues += 1
            is_before = 0 <= last == index - 1
            is_alone = is_before and (last == 0 or not lines[last - 1].strip())
            number = lines[last].strip() if last >= 0 else ""
            is_number = number.isdecimal() and (is_before or number == str(cues))
            if is_number or (is_vtt and is_alone):
                names.add(last)
        if line.strip():
            last = index
    return names
