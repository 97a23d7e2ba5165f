"""Encodings of text: what is certain is read, and the rest is an error that says what to do."""

from __future__ import annotations

import pytest

from decoding.app.documents.formats.encodings import decode_legacy, decode_unicode
from offload.errors import InvalidRequestError

FRENCH = (
    "Le père Goriot, vieillard de soixante-neuf ans environ, s'était retiré chez madame Vauquer, "
    "après avoir quitté les affaires. « Où êtes-vous ? » demanda-t-il à l'hôtesse.\n"
)
GERMAN = (
    "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett zu "
    "einem ungeheueren Ungeziefer verwandelt. Er sah seinen gewölbten Bauch. Größe, Maß, Füße.\n"
)
RUSSIAN = (
    "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. "
    "Всё смешалось в доме Облонских.\n"
)
HUNGARIAN = (
    "Minden emberi lény szabadon születik és egyenlő méltósága és joga van. Az emberek, ésszel és "
    "lelkiismerettel bírván, egymással szemben testvéri szellemben kell hogy viseltessenek.\n"
)
PORTUGUESE = "Todos nascem livres e iguais em dignidade e em direitos. Não há coração.\n"
OEUVRE = "L'été où l'œuvre était là, déjà vu, garçon, naïve, forêt, à 5 €.\n"
GREEK = (
    "Άνδρα μοι έννεπε, Μούσα, πολύτροπον, ος μάλα πολλά πλάγχθη, επεί Τροίης ιερόν πτολίεθρον "
    "έπερσεν. Και είδε πολλών ανθρώπων πόλεις.\n"
)
CHINESE = "道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。故常无欲，以观其妙。\n"
JAPANESE = (
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所でニャーニャー"
    "泣いていた事だけは記憶している。\n"
)


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("utf-8", "utf-8"),
        ("utf-8-sig", "utf-8"),
        ("utf-16", "utf-16"),
        ("utf-32", "utf-32"),
        ("utf-16-le", "utf-16-le"),
        ("utf-16-be", "utf-16-be"),
    ],
)
def test_unicode_is_recognised_with_and_without_a_mark(encoding: str, expected: str) -> None:
    text = "It was the best of times, it was the worst of times — “naïve”.\n"
    assert decode_unicode(text.encode(encoding)) == (text, expected)


@pytest.mark.parametrize(
    "raw",
    [
        b"\0",
        b"a\0b",
        b"\x7fELF\x02\x01\x01" + bytes(9),
        "It was".encode("utf-16-le") + b"\1\0",  # a control character
        "It was".encode("utf-32-le"),
        b"\xff\xfe\x00\xd8",  # half of a pair
        b"\xff\xfe\x00\x00\x00\x00\x11\x00",
    ],
)
def test_binary_content_is_an_error(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"binary.*Save it as UTF-8"):
        decode_unicode(raw)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (FRENCH, "cp1252"),
        (FRENCH, "latin1"),
        (GERMAN, "latin1"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8_r"),
        (RUSSIAN, "iso8859_5"),
        (CHINESE, "gb18030"),
        (JAPANESE, "shift_jis"),
        (JAPANESE, "euc_jp"),
        (JAPANESE, "iso2022_jp"),
    ],
)
def test_text_in_a_certain_encoding_is_read(text: str, encoding: str) -> None:
    pytest.importorskip("charset_normalizer")
    raw = (3 * text).encode(encoding)
    assert decode_unicode(raw) is None
    assert decode_legacy(raw)[0] == 3 * text


@pytest.mark.parametrize("text", ["ls \x1b$ plain", "prompt \x1b$B € ok"])
def test_escapes_of_terminals_are_no_encoding(text: str) -> None:
    assert decode_unicode(text.encode()) == (text, "utf-8")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (HUNGARIAN, "cp1250"),
        (GREEK, "cp1253"),
        (FRENCH, "cp850"),
        (FRENCH, "mac_roman"),
        (PORTUGUESE, "cp850"),
        (OEUVRE, "iso8859_15"),
    ],
)
def test_encodings_that_fit_equally_well_are_an_error(text: str, encoding: str) -> None:
    """Each of them would read some letters as others."""
    pytest.importorskip("charset_normalizer")
    with pytest.raises(InvalidRequestError, match=r"it may be .*iconv -f"):
        decode_legacy((3 * text).encode(encoding))
