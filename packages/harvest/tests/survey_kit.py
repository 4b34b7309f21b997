"""The strongest examples of a feature, by a look at all rows at once."""

from midstream_harvest.surveys.rows import DocumentRows


def examples_of(
    rows: DocumentRows, feature: int, top: int, context: int
) -> list[tuple[object, ...]]:
    """All rows by value, document and position; the first of each document; with neighbours."""
    values = rows.values[:, feature].tolist()
    keys = list(zip(rows.documents.tolist(), rows.positions.tolist(), strict=True))
    order = sorted(range(len(keys)), key=lambda row: (-values[row], *keys[row]))
    found: dict[int, int] = {}
    for row in order:
        if values[row] > 0:
            found.setdefault(keys[row][0], row)
    result: list[tuple[object, ...]] = []
    for row in list(found.values())[:top]:
        document, position = keys[row]
        near = [
            (keys[other][1], int(rows.token_ids[other]), values[other])
            for other in range(len(keys))
            if keys[other][0] == document and abs(keys[other][1] - position) <= context
        ]
        result.append((document, position, values[row], near))
    return result
