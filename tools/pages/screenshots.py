"""Pictures of the page for docs/page.md, on the demo model: `make screenshots`.

Arguments: only these pictures, such as `page-sweep`. MIDSTREAM_ENGINE=fake: without a model.
"""

import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / part) for part in ("", "fake_engine", "system")]
sys.path.append(str(ROOT / "packages" / "page" / "tests"))

from PIL import Image  # noqa: E402
from playwright.sync_api import Page, expect, sync_playwright  # noqa: E402
from up_kit import Up  # noqa: E402
from web_kit import LONG_S, NARROW, WIDE, launched  # noqa: E402

from midstream import Client, probes  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SEA = ["The ocean waves crash on the sandy beach", "A ship sails across the deep blue sea"]
CORPUS = [
    *SEA,
    "I think that the train to Berlin leaves at nine, but my friend told me ten.",
    "My friend thinks the newspaper is wrong about the new library in our street.",
    "She wrote in her diary that the soup of the day was cold, and that nobody liked it.",
    "Do you think so? he asked, and she said that she did not know what to think.",
    "We spent the holidays at the coast, where the waves were higher than our house.",
    "The council voted on the new budget, but most of the members were against it.",
]
LAND = ["The office printer is out of paper again", "A train crosses the dry inland plain"]


def middle(client: Client) -> int:
    """A layer in the middle of the model."""
    return int(client.model(client.models()[0])["num_layers"]) // 2


def prepare(client: Client) -> None:
    """The module `sea` of the README, a probe of the same texts, a survey, a policy and a dose."""
    layer = middle(client)
    job = client.run(
        prompts=SEA + LAND,
        model=client.models()[0],
        max_tokens=0,
        capture={"layers": layer, "positions": "all_prompt"},
    )
    rows = client.capture(job.id)
    means = [rows.array(layer, request=number)[1:].mean(0) for number in range(4)]
    client.modules.put(
        "sea", [{"layers": layer, "vector": (means[0] + means[1] - means[2] - means[3]) / 2}]
    )
    texts = [row for number in range(4) for row in rows.array(layer, request=number)[1:]]
    labels = [int(number < 2) for number in range(4) for _ in rows.array(layer, request=number)[1:]]
    client.saes.put("words", "smollm2-15", description="20,226 tokens")
    harvest = client.harvests.submit(
        model=client.models()[0],
        source={"lines": CORPUS},
        layers=[15],
        positions={"skip_first": 1},
        metadata={"name": "Eight sentences"},
    )
    client.harvests.survey(client.harvests.wait(harvest), sae="words")
    client.probes.put("water", probes.fit(texts, labels), layer=layer, labels=["water"])
    condition = {"aggregation": "mean", "window": 3, "at_least": 4.0, "release_below": 2.0}
    condition |= {"schedule": {"tokens": "all", "start": 1}}
    client.policies.put("sea-watch", probe="water", condition=condition, actions=["flag"])
    client.dose(
        model=client.models()[0],
        prompts=["My favourite thing to do at the weekend is", "We spent the holidays"],
        steering=[{"vector": (means[0] + means[1] - means[2] - means[3]) / 2, "norm_match": True}],
        layers=[layer - 5, layer, layer + 5],
        scales=[-0.4, -0.2, -0.1, 0.1, 0.2, 0.4, 0.8],
        effect={"target": " sailing"},
        held_out=[
            "Water boils at a lower temperature on a mountain, because the air presses less."
        ],
        max_tokens=24,
    )
    for name, steering in (("Holidays", []), ("Holidays at sea", [{"module": "sea"}])):
        client.run(
            model=client.models()[0],
            prompts=["We spent the holidays"],
            max_tokens=40,
            steering=steering,
            capture={"layers": "all", "positions": "all_prompt"},
            metadata={"name": name},
            progress=False,
        )


def start(page: Page) -> None:
    """With the results of the pictures before, and one that says what a sweep found."""
    expect(page.get_by_text("most: ").first).to_be_visible()


def capture(page: Page) -> None:
    page.get_by_role("button", name="Capture", exact=True).click()
    expect(page.locator(".chip").first).to_be_visible()
    slider = page.get_by_role("slider")
    slider.fill(str(int(slider.get_attribute("max") or 0) // 2))


def playground(page: Page) -> None:
    page.get_by_role("button", name="Add sea").click()
    page.get_by_label("Colour tokens by").select_option("water: water")
    page.get_by_role("button", name="Run").click()
    for title in ("Baseline", "Steered"):
        expect(page.get_by_role("region", name=title)).to_contain_text("finished")
        expect(
            page.get_by_role("region", name=title).get_by_role("group", name="prompt")
        ).to_be_visible()


def lens(page: Page) -> None:
    page.get_by_label("Tokens to follow").fill(" Paris| Rome")
    page.get_by_role("button", name="Read the layers").click()
    expect(page.locator(".lens")).to_be_visible()


def attention(page: Page) -> None:
    """A layer with an induction head."""
    page.get_by_role("button", name="Show the patterns").click()
    expect(page.locator(".pattern-big")).to_be_visible()
    page.locator("main label select").last.select_option("18")
    expect(page.locator(".finding")).to_contain_text("what followed")


def features(page: Page) -> None:
    page.get_by_role("button", name="Read features").click()
    expect(page.locator(".examples")).to_be_visible()


def direction(page: Page) -> None:
    page.get_by_text("Make a direction from two lists of texts").click()
    page.get_by_role("button", name="Make and try it").click()
    for title in ("Baseline", "Steered"):
        expect(page.get_by_role("region", name=title)).to_contain_text("finished")


def policy(page: Page) -> None:
    """Its hits are those of the prompts that are tried."""
    for prompt in ("The old ship left the harbour and", "The printer in the office is", SEA[0]):
        page.get_by_label("Prompt", exact=True).fill(prompt)
        page.get_by_role("button", name="Try a prompt").click()
        expect(page.get_by_text("From this job")).to_be_visible()
        page.goto(page.url.partition("/job_")[0])
    page.get_by_role("region", name="Recent").get_by_role("link").first.click()
    expect(page.get_by_role("figure", name="Scores that sea-watch read")).to_be_visible()


def dose(page: Page) -> None:
    page.locator("tr[data-id]").filter(has_text="dose").first.click()
    page.get_by_role("link", name="Open the curves").click()
    expect(page.get_by_role("figure", name="Damage")).to_be_visible()


def compare(page: Page) -> None:
    for name in ("Holidays", "Holidays at sea"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    page.get_by_role("link", name="Compare both").click()
    expect(page.locator(".cells canvas")).to_be_visible()


def form(page: Page) -> None:
    page.get_by_role("button", name="Try an example").click()
    expect(page.locator(".aligned")).to_be_visible()


def sweep(page: Page) -> None:
    form(page)
    page.get_by_role("button", name="Run the sweep").click()
    expect(page.locator(".cells canvas").first).to_be_visible()
    expect(page.get_by_text("succeeded").first).to_be_visible()


def jobs(page: Page) -> None:
    expect(page.locator("tr[data-id]").first).to_be_visible()


def opened(page: Page) -> None:
    """One of the captures, whose receipts and files there are."""
    page.locator("tr[data-id]").filter(has_text="generate · page").first.click()
    expect(page.locator("section.details")).to_contain_text("All ranks agree")


def ops(page: Page) -> None:
    expect(page.get_by_text("All ranks agree")).to_be_visible()
    expect(page.get_by_role("region", name="Workers")).to_be_visible()


class Shot(NamedTuple):
    view: str
    do: Callable[[Page], None]  # before the picture is taken
    whole: bool = False  # all of the page, not what a window shows
    size: tuple[int, int] = WIDE
    scheme: Literal["light", "dark"] = "light"


#: File → picture, in this order: those that follow see the jobs of those before.
SHOTS = {
    "page-capture": Shot("capture", capture, whole=True),
    "page-playground": Shot("playground", playground, whole=True),
    "page-lens": Shot("lens", lens, whole=True),
    "page-attention": Shot("attention", attention, whole=True),
    "page-features": Shot("features", features, whole=True),
    "page-policy": Shot("policies/sea-watch", policy, whole=True),
    "page-dose": Shot("jobs", dose, whole=True),
    "page-compare": Shot("jobs", compare, whole=True),
    "page-direction": Shot("playground", direction, whole=True),
    "page-sweep-form": Shot("sweep", form, whole=True),
    "page-sweep": Shot("sweep", sweep, whole=True),
    "page-start": Shot("start", start),
    "page-jobs": Shot("jobs", opened),
    "page-jobs-dark": Shot("jobs", jobs, scheme="dark", size=(1280, 420)),
    "page-jobs-phone": Shot("jobs", jobs, size=NARROW),
    "page-ops": Shot("ops", ops),
}


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        up = Up(
            Path(folder) / "data",
            engine=os.environ.get("MIDSTREAM_ENGINE", "vllm"),
            model_name=None,
            hooks="all,inside",  # for attention
            artifacts_dir=ROOT / "examples" / "data",
            harvest_stores=Path(folder) / "rows",
        )
        try:
            url = up.ready(600.0)
            with Client(url) as client:
                prepare(client)
            expect.set_options(timeout=5 * LONG_S * 1000)
            browser = launched(playwright)
            for name, shot in SHOTS.items():
                if names and name not in names:
                    continue
                page = browser.new_page(
                    viewport={"width": shot.size[0], "height": shot.size[1]},
                    color_scheme=shot.scheme,
                )
                page.goto(f"{url}/#/{shot.view}")
                # a phone hides these figures
                expect(page.locator(".figures")).to_contain_text("1 of 1 healthy")
                shot.do(page)
                time.sleep(1)  # the feed's next event
                taken = Image.open(io.BytesIO(page.screenshot(full_page=shot.whole))).convert("RGB")
                taken.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                    IMAGES / f"{name}.png", optimize=True
                )
                page.close()
        finally:
            up.close()


if __name__ == "__main__":
    main(sys.argv[1:])
