"""Reads the pages that Esper writes."""

from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "hr", "img"}
"""Elements that have no end tag."""

EVIL = "</script><script>alert(1)</script>\" onload='x' \u202e\x1b[31m&amp;"
"""A name that tries to end a script, to run one, to turn the text around and to colour a terminal."""


class Page(HTMLParser):
    """Keeps the tags that are open, and what the page holds; fails where a tag is closed that is not open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def said(self):
        return " ".join(" ".join(self.texts).split())
