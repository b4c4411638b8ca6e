"""The chain of a run's versions: each record has a link, a digest of its content and of the previous link.

    link(v) = SHA-256(v, digest of the weights, digest of the batch, SHA-256 of the configuration, link(v - 1))

The configuration is the one that the update was made under. A change of a record, or of anything it names, requires a
change of every later link, and so of the last one. The chain has no key: the owner of a folder can recompute it, which
only a copy of the last link elsewhere reveals.
"""

import hashlib
import json
from collections.abc import Mapping

from msgspec import structs

from streamppo.queue.rules.records import PublishedVersion


def linked(made: PublishedVersion, configs: Mapping[int, bytes], before: str) -> PublishedVersion:
    """The record with its link; `before` is the link of the version before, and `configs` are the journal's."""
    since = max((first for first in configs if first < made.version), default=None)
    config = "" if since is None else hashlib.sha256(configs[since]).hexdigest()
    content = json.dumps([made.version, made.digest, made.batch_digest, config, before])
    return structs.replace(made, link=hashlib.sha256(content.encode()).hexdigest())


def breaks(versions: Mapping[int, PublishedVersion], configs: Mapping[int, bytes]) -> list[int]:
    """The first missing version of every gap, and the versions whose link does not follow from their record and the
    link before.
    """
    missing = {0, *(version + 1 for version in versions)} - {max(versions, default=-1) + 1} - versions.keys()
    links = {version: made.link for version, made in versions.items()}
    broken = {
        version
        for version, made in versions.items()
        if linked(made, configs, links.get(version - 1, "")).link != made.link
    }
    return sorted(missing | broken)
