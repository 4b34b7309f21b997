"""Do the views of readings, modules and harvests show what the API answers?"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from safetensors.numpy import load
from web_kit import NARROW, PNG, Site, Visit, saved, visiting

from midstream.client import Client
from midstream.client.captures.attention import pattern
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.model.attention import AttentionKind

HIDDEN = 8
VIEWS = ("lens", "attention", "features", "probes", "policies", "modules", "harvests", "playground")


@pytest.fixture(scope="module", autouse=True)
def _registered(site: Site) -> None:
    """An SAE, a probe of two labels and a module."""
    with Client(site.url, api_key=site.operator.key) as client:
        client.saes.put("tiny", "standard")
        fields = {"labels": ["calm", "angry"], "thresholds": [None, 5.0]}
        client.probes.put("calm", weight=np.ones((2, HIDDEN)), layer=-1, **fields)
    with Client(site.url, api_key=site.alice.key) as client:
        client.modules.put("sea", [{"layers": [1, 2], "vector": np.ones(HIDDEN)}])


def result_of(site: Site, visit: Visit) -> dict[str, Any]:
    """The result of the job that the view shows."""
    visit.page.wait_for_url(re.compile(r"job_\w+"))
    job = str(re.search(r"job_\w+", visit.page.url)[0])  # type: ignore[index]
    site.alice.wait(job)
    return site.alice.get(f"/v1/jobs/{job}/result")


def asked(site: Site, visit: Visit, view: str, fields: dict[str, str], button: str) -> Page:
    """The view in which `fields` (label → text) are filled and `button` is clicked."""
    page = visit.log_in(site.alice, view)
    for label, text in fields.items():
        page.get_by_label(label).fill(text)
    page.get_by_role("button", name=button).click()
    return page


def test_the_lens_shows_top_tokens_and_follows_one(site: Site, visit: Visit) -> None:
    fields = {"Prompt": "hello", "Tokens to follow": "e"}
    page = asked(site, visit, "lens", fields, "Read the layers")
    grid = page.get_by_role("group", name="Top token by layer and position")
    expect(grid.locator("tbody tr")).to_have_count(4)
    (lens,) = result_of(site, visit)["lens"]
    words = site.alice.post("/v1/detokenize", model="fake-model", tokens=lens["top_tokens"][3][4])
    side = page.get_by_role("list", name="Most likely next tokens")
    expect(side.locator(".bar-text")).to_have_text(words["token_strs"])
    expect(page.locator(".finding")).to_contain_text("from layer 3 on")
    assert saved(page, "Most likely next token", "PNG").startswith(PNG)
    records = saved(page, "Most likely next token", "CSV").splitlines()
    assert len(records) == 1 + sum(len(row) for layer in lens["top_tokens"] for row in layer)
    grid.focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("heading", name="Layer 2, after")).to_be_visible()
    page.get_by_label("Colour by").select_option("0")
    expect(grid.locator("td.here")).to_have_text(str(lens["named_ranks"][2][4][0]))


def test_features_shade_the_text_and_list_the_strongest(site: Site, visit: Visit) -> None:
    page = asked(site, visit, "features", {"Prompt": "abab"}, "Read features")
    (found,) = result_of(site, visit)["features"]
    records = saved(page, "Features of tiny", "CSV").splitlines()
    assert len(records) == 1 + sum(map(len, found["features"]))
    of_token = page.get_by_role("list", name="Features of the token")
    expect(of_token.locator(".bar-text")).to_have_text([str(each) for each in found["features"][1]])
    page.get_by_role("group", name="Tokens", exact=True).focus()
    page.keyboard.press("ArrowRight")
    expect(of_token.locator(".bar-text")).to_have_text([str(each) for each in found["features"][2]])
    strongest = page.get_by_role("list", name="Features", exact=True).get_by_role("button").first
    strongest.click()
    expect(strongest).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".finding")).to_contain_text(f"Feature {found['features'][1][0]} ")
    expect(page.locator('.chip[data-position="3"]')).to_have_attribute("title", "b: 1.0")


def test_a_probe_draws_scores_and_its_threshold(site: Site, visit: Visit) -> None:
    fields = {"Prompt": "hello", "Tokens to generate": "4"}
    page = asked(site, visit, "probes?probe=calm", fields, "Score the text")
    page.get_by_label("Label").select_option("1")
    expect(page.get_by_text("threshold 5", exact=True)).to_be_visible()
    expect(page.locator(".finding")).to_contain_text("it reached its threshold of 5 at token 4")
    found, *_ = result_of(site, visit)["probes"]
    expect(page.locator(".chip")).to_have_count(found["positions"])
    page.get_by_role("group", name="Score by token").focus()
    page.keyboard.press("ArrowLeft")
    files = {kind: saved(page, "Score of angry", kind) for kind in ("SVG", "CSV", "PNG")}
    assert files["PNG"].startswith(PNG)
    assert files["SVG"].startswith(b"<svg")
    assert b"threshold 5" in files["SVG"]
    assert b"var(" not in files["SVG"], "the page's sheet is not in the file"
    assert len(files["CSV"].splitlines()) == found["positions"] + 1
    score = found["tokens"][-2][1]
    expect(page.get_by_role("status").filter(has_text="token")).to_contain_text(f": {score:g}")
    page.reload()
    for label, text in {**fields, "Probe": "calm"}.items():
        expect(page.get_by_label(label, exact=True)).to_have_value(text)


def test_a_policy_shows_hits_and_decisions_and_switches_after_a_question(
    site: Site, visit: Visit
) -> None:
    """The page's aggregates are those that decided."""
    condition = {"aggregation": "mean", "window": 2, "at_least": 104.0, "release_below": 101.0}
    condition |= {"schedule": {"tokens": "all"}}
    path = "/v1/artifacts/policies/guard"
    with Client(site.url, api_key=site.operator.key) as client:
        client.probes.put("ids", weight=np.ones((1, HIDDEN)), layer=-1, labels=["token"])
        client.policies.put("guard", probe="ids", condition=condition, actions=["flag"])
    page = visit.log_in(site.operator, "policies")
    page.get_by_role("link", name="guard").click()
    page.get_by_label("Prompt", exact=True).fill("hello baba")
    page.get_by_role("button", name="Try a prompt").click()
    page.wait_for_url(re.compile(r"job_\w+"))
    job = page.url.rpartition("/")[2]
    site.operator.wait(job)
    read, asked = sorted(
        site.operator.get(f"/v1/jobs/{job}/result")["probes"],
        key=lambda found: found["policy"] is None,
    )
    rows = page.get_by_role("region", name="Decisions of guard").locator("tbody tr")
    expect(rows).to_have_count(len(read["decisions"]))
    expect(page.get_by_text("on at 104 or above")).to_be_visible()
    values = page.evaluate(
        """async ([scores, condition]) =>
          (await import("/page/plots/token_scores.js")).aggregates(scores, condition, 10)""",
        [[row[0] for row in asked["tokens"]], read["policy"]["condition"]],
    )
    assert [values[each["position"]] for each in read["decisions"]] == [
        each["score"] for each in read["decisions"]
    ]
    assert {each["event"] for each in read["decisions"]} == {"trigger", "release"}
    page.reload()
    expect(page.locator(".finding").first).to_contain_text("1 prompt in 30 days")
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("hello baba")
    expect(page.get_by_text("on at 104 or above")).to_be_visible()
    visit.check_apart()
    page.get_by_role("combobox", name="Mode").select_option("active")
    for answer, versions in (("dismiss", 1), ("accept", 2)):
        page.once("dialog", lambda dialog, answer=answer: getattr(dialog, answer)())
        page.get_by_role("button", name="Switch").click()
        visit.until(
            lambda versions=versions: len(site.operator.get(path)["versions"]) == versions, answer
        )
    expect(page.locator(".stat").first).to_contain_text("active")
    visit.check_shown()


def test_a_chat_of_several_turns_is_tried_under_a_policy(site: Site, visit: Visit) -> None:
    with Client(site.url, api_key=site.operator.key) as client:
        client.probes.put("ids", weight=np.ones((1, HIDDEN)), layer=-1, labels=["token"])
        condition = {"at_least": 104.0}
        client.policies.put("chats", probe="ids", condition=condition, actions=["flag"])
    page = visit.log_in(site.operator, "policies/chats")
    text = "system: be brief\nuser: hello\nbaba\nassistant: yes\nuser: why?"
    page.get_by_label("Prompt", exact=True).fill(text)
    page.get_by_label("Sent as").select_option("chat")
    page.get_by_role("button", name="Try a prompt").click()
    page.wait_for_url(re.compile(r"job_\w+"))
    job = page.url.rpartition("/")[2]
    assert site.operator.get(f"/v1/jobs/{job}/request")["body"]["messages"] == [
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello\nbaba"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "why?"},
        ]
    ]
    site.operator.wait(job)
    expect(page.get_by_role("region", name="Decisions of chats")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(text)
    expect(page.get_by_label("Sent as")).to_have_value("chat")
    visit.check_shown()


def test_decisions_are_shown_without_scores_of_the_policys_probe(site: Site, visit: Visit) -> None:
    with Client(site.url, api_key=site.operator.key) as client:
        client.probes.put("letters", weight=np.ones((1, HIDDEN)), layer=-1)
        client.policies.put("early", probe="letters", condition={"at_least": -1e6}, actions=[])
    scores = [{"probe": "calm", "tokens": True}]  # not of the policy's probe
    job = site.operator.ended(("hello",), policies=["early"], probes=scores)
    decided = visit.log_in(site.operator).get_by_role("region", name="Decisions of early")
    for view in ("jobs", "probes"):
        visit.open(f"{view}/{job}")
        expect(decided.locator("tbody tr").first).to_contain_text(re.compile(r"^0 .+trigger"))


def test_attention_says_what_a_model_without_its_hooks_needs(site: Site, visit: Visit) -> None:
    visit.log_in(site.alice, "attention")
    expect(visit.page.get_by_text("midstream up --set hooks=all,inside")).to_be_visible()


def test_an_invented_example_is_smaller_than_a_figure(site: Site, visit: Visit) -> None:
    page = visit.log_in(site.alice, "attention")
    drawn = page.get_by_role("region", name="What it shows").locator("svg")
    expect(drawn).to_be_visible()
    box = drawn.bounding_box()
    assert box is not None
    assert box["width"] <= 320


def test_classes_of_a_probe_mix_to_no_third_colour(site: Site, visit: Visit) -> None:
    histogram = {"edges": [-1.0, 0.0, 1.0], "negative": [3, 2], "positive": [1, 4]}
    roc = {"fpr": [0.0, 1.0], "tpr": [0.0, 1.0], "auc": 0.5}
    listed = site.alice.get("/v1/artifacts/probes", model="fake-model")
    for probe in listed["probes"]:
        probe["held_out"] = [{"roc": roc, "histogram": histogram}] * len(probe["content"]["labels"])
    visit.page.route("**/v1/artifacts/probes?*", lambda route: route.fulfill(json=listed))
    page = visit.log_in(site.alice, "probes?probe=calm")
    figure = page.get_by_role("figure", name="Scores of both classes")
    expect(figure.locator("g rect.fill, g rect.outline")).to_have_count(2)  # the key
    expect(figure.locator("svg > rect.fill")).to_have_count(2)
    expect(figure.locator("svg > rect.outline")).to_have_count(2)
    expect(figure).to_contain_text("others")
    expect(figure).to_contain_text("calm")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"window": 3, "softcap": 2.0},
        {"chunk": 4, "slopes": [0.5, 0.25, 0.1, 0.0]},
        {"sinks": [0.1, 1.0, -1.0, 0.0]},
    ],
)
def test_the_page_computes_the_patterns_of_the_client(
    site: Site, visit: Visit, more: dict[str, Any]
) -> None:
    visit.open()
    rng = np.random.default_rng(1)
    queries, keys = (rng.standard_normal((9, width), np.float32) for width in (4 * 6, 2 * 6))
    kind = AttentionKind(layers=[0], heads=4, head_dim=6, scale=0.4, **more)
    expected = pattern(queries, keys, kind, range(9), heads=[1, 3])
    given = [
        {"shape": list(rows.shape), "values": rows.ravel().tolist()} for rows in (queries, keys)
    ]
    fields = {"heads": 4, "head_dim": 6, "scale": 0.4} | more
    found = visit.page.evaluate(
        """async ([queries, keys, kind]) => {
            const { pattern } = await import("/page/lib/attention.js");
            return [1, 3].map((head) => Array.from(pattern(queries, keys, kind, head)));
        }""",
        [*given, fields],
    )
    np.testing.assert_allclose(np.array(found).reshape(2, 9, 9), expected, atol=1e-6)


def test_modules_lists_every_kind_and_deletes(site: Site, visit: Visit) -> None:
    with Client(site.url, api_key=site.alice.key) as client:
        entry = {"layers": [0], "vector": np.ones(HIDDEN), "positions": {"start": 1}}
        client.modules.put("short-lived", [entry])
    page = visit.log_in(site.alice, "modules")
    expect(page.get_by_role("article", name="short-lived")).to_contain_text("· tokens from 1 ·")
    for name in ("sea", "calm", "tiny", "short-lived"):
        expect(page.get_by_role("article", name=name)).to_be_visible()
    expect(page.get_by_role("article", name="sea")).to_contain_text("add at post_block, layers 1-2")
    page.get_by_label("Find").fill("tokens from 1")
    expect(page.get_by_role("article")).to_have_count(1)
    page.get_by_label("Find").fill("")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("article", name="short-lived").get_by_text("Details").click()
    page.get_by_role("button", name="Delete short-lived").click()
    expect(page.get_by_role("article", name="short-lived")).to_have_count(0)
    left = site.alice.get("/v1/artifacts/modules")["modules"]
    assert "short-lived" not in {module["name"] for module in left}
    page.get_by_role("link", name="Use sea").click()
    expect(page.get_by_role("group", name="Module sea")).to_be_visible()


def test_a_harvest_is_started_followed_and_deleted(site: Site, visit: Visit) -> None:
    documents = {"Documents": "one document\n\nanother one"}
    page = asked(site, visit, "harvests", documents, "Harvest 2 documents")
    expect(page.get_by_text("midstream.harvest.open")).to_be_visible()
    head = page.get_by_role("paragraph").filter(has_text="All harvests")
    expect(head).to_contain_text("fake-model")
    (made,) = site.alice.get("/v1/harvests")["harvests"]
    assert made["state"] == "succeeded"
    assert made["rows"] == len("one document" + "another one")
    expect(page.locator(".stat").filter(has_text="Rows")).to_contain_text(str(made["rows"]))
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No harvests yet")).to_be_visible()


def test_a_survey_shows_each_feature_in_its_contexts(site: Site, visit: Visit) -> None:
    with Client(site.url, api_key=site.alice.key) as client:
        lines = ["one document", "another one", "a third"]
        view = client.harvests.submit(model="fake-model", source={"lines": lines}, layers=[1])
        client.harvests.wait(view)
    fields = {"Examples of each feature": "2"}
    page = asked(site, visit, f"harvests/{view.id}", fields, "Find examples")
    page.get_by_role("link", name="features of tiny").click()
    (entry,) = site.alice.get(f"/v1/harvests/{view.id}")["surveys"]
    path = f"/v1/harvests/{view.id}/surveys/{entry['job']}"
    features = site.alice.get(f"{path}?limit=100")["features"]
    listed = page.get_by_role("list", name="Features of the harvest")
    expect(listed.locator(".bar-text")).to_have_text(
        [re.compile(f"^{each['feature']} mean") for each in features]
    )
    assert len(saved(page, "features of tiny", "CSV").splitlines()) == 1 + len(features)
    third = features[2]["feature"]
    listed.get_by_role("button").nth(2).click()
    expect(page.get_by_role("heading", name=f"Examples of feature {third}")).to_be_visible()
    found = site.alice.get(f"{path}?feature={third}")["examples"]
    assert len(found) == 2
    expect(page.locator(".examples .chips")).to_have_count(2)
    for number, example in enumerate(found):
        chips = page.locator(".examples .chips").nth(number).locator(".chip")
        text = lines[example["document"]]
        expect(chips).to_have_text([text[at].replace(" ", "·") for at in example["positions"]])
        at = page.locator(".examples li").nth(number)
        expect(at).to_contain_text(f"token {example['position']} of document {example['document']}")
    visit.open(f"jobs/{entry['job']}")
    expect(page.get_by_role("heading", name="Survey of a harvest")).to_be_visible()
    with Client(site.url, api_key=site.alice.key) as client:
        client.harvests.delete(view)


def test_features_stand_beside_the_examples_of_a_survey(site: Site, visit: Visit) -> None:
    with Client(site.url, api_key=site.alice.key) as client:
        lines = ["one document", "another one", "a third"]
        view = client.harvests.submit(model="fake-model", source={"lines": lines}, layers=[1])
        survey = client.harvests.survey(client.harvests.wait(view), sae="tiny", top=2)
    # features of the fake engine begin with the token's id: these are some that the SAE has
    job = site.alice.ended(([1, 5, 9],), features=[{"sae": "tiny"}])  # type: ignore[arg-type]
    page = visit.log_in(site.alice, f"features/{job}")
    beside = page.get_by_role("complementary", name="Examples")
    picked = page.get_by_role("list", name="Features", exact=True).get_by_role("button").nth(1)
    feature = picked.locator(".bar-text").inner_text().split()[0]
    expect(beside).not_to_contain_text(f"feature {feature}")
    picked.focus()
    page.keyboard.press("Enter")
    expect(beside.get_by_role("heading")).to_have_text(f"Examples of feature {feature}")
    found = site.alice.get(f"/v1/harvests/{view.id}/surveys/{survey.survey.job}?feature={feature}")
    (density,) = found["figures"]["density"]
    (mean,) = found["figures"]["mean"]
    expect(beside).to_contain_text(f"Active on {100 * density:.2f} %")
    expect(beside).to_contain_text(f"its mean is {mean:#.2g}")
    shown = [
        "".join(lines[example["document"]][at] for at in example["positions"]).replace(" ", "·")
        for example in found["examples"]
    ]
    expect(beside.locator(".chips")).to_have_text(shown)
    visit.check_shown()
    beside.get_by_role("link", name="The survey").click()
    page.wait_for_url(re.compile(f"harvests/{view.id}/{survey.survey.job}$"))
    expect(page.locator(".examples .chips").first).to_be_visible()  # nothing more is asked of it
    with Client(site.url, api_key=site.alice.key) as client:
        client.harvests.delete(view)
    visit.open(f"features/{job}")
    expect(page.get_by_text("No survey of tiny")).to_be_visible()
    expect(beside).to_have_count(0)


def test_a_feature_is_steered_by_and_saved(site: Site, visit: Visit) -> None:
    job = site.alice.ended(([1, 5, 9],), features=[{"sae": "tiny"}])  # type: ignore[arg-type]
    page = visit.log_in(site.alice, f"features/{job}")
    picked = page.get_by_role("list", name="Features", exact=True).get_by_role("button").first
    feature = int(picked.locator(".bar-text").inner_text().split()[0])
    value = float(picked.locator(".bar-value").inner_text())
    picked.click()
    page.get_by_role("link", name="Steer by it").click()
    expect(page.get_by_role("group", name=f"Module tiny feature {feature}")).to_be_visible()
    page.get_by_role("button", name="Run", exact=True).click()
    for title in ("Baseline", "Steered"):
        expect(page.get_by_role("region", name=title)).to_contain_text("finished")
    code = page.locator('pre[data-code="Python"]').text_content() or ""
    for words in ('"sae": "tiny"', f'"feature": {feature}', f'"value": {value:g}'):
        assert words in code
    page.get_by_label("Save as a module").fill("found")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("group", name="Module found")).to_be_visible()
    module = site.alice.get("/v1/artifacts/modules/found")
    assert module["description"] == f"feature {feature} of tiny"
    assert [entry["op"] for entry in module["entries"]] == ["add"]


def test_a_direction_of_two_lists_is_tried_and_saved(site: Site, visit: Visit) -> None:
    page = visit.log_in(site.alice, "playground")
    page.get_by_text("Make a direction from two lists of texts").click()
    page.get_by_label("Towards these texts").fill("red sea\nblue")
    page.get_by_label("Away from these texts").fill("office")
    page.get_by_role("button", name="Make and try it").click()
    for title in ("Baseline", "Steered"):
        expect(page.get_by_role("region", name=title)).to_contain_text("finished")
    spread = page.get_by_role("figure", name="Texts along the direction")
    for words in ("away", "towards", "component, in the rows' scale", "of 3 on their list's side"):
        expect(spread).to_contain_text(words)
    expect(spread.locator(".dot")).to_have_count(3)
    assert len(saved(page, "Texts along the direction", "CSV").splitlines()) == 4
    capture = {"layers": 2, "positions": "all_prompt"}
    texts = ("red sea", "blue", "office")
    with Client(site.url, api_key=site.alice.key) as client:
        reader = client.capture(
            client.run(
                model="fake-model",
                prompts=list(texts),
                capture=capture,
                max_tokens=1,
                progress=False,
            )
        )
        red, blue, office = (reader.array(2, request=n)[1:].mean(0, np.float64) for n in range(3))
    page.get_by_label("Save as a module").fill("coast")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("group", name="Module coast")).to_be_visible()
    (entry,) = site.alice.get("/v1/artifacts/modules/coast")["entries"]
    assert entry["layers"] == [2]
    assert entry["norm_match"] is True
    assert entry["scale"] == 0.2
    expected = ((red + blue) / 2 - office).astype("<f4")
    file = site.alice.http.get("/v1/artifacts/modules/coast/file").content
    (kept,) = (rows for rows in load(file).values() if rows.shape == (HIDDEN,))
    np.testing.assert_allclose(kept, expected, rtol=1e-5, atol=1e-6)
    tags = {tag for held in site.alice.get("/v1/captures")["captures"] for tag in held["tags"]}
    assert "direction" not in tags, "its rows are deleted once they were read"


def test_a_job_shows_the_readings_that_it_holds(site: Site, visit: Visit) -> None:
    job = site.alice.ended(
        ("hello", "you"), lens={"layers": "all"}, features=[{"sae": "tiny"}], probes=["calm"]
    )
    visit.log_in(site.alice, f"jobs/{job}")
    details = visit.page.locator("section.details")
    for heading in ("Lens", "Features of tiny", "Scores of calm"):
        expect(details.get_by_role("heading", name=heading, exact=True)).to_be_visible()
    expect(details.locator(".lens thead th")).to_have_count(2)
    visit.page.get_by_label("Readings of prompt").fill("1")
    visit.page.get_by_label("Readings of prompt").blur()
    expect(details.locator(".lens thead th").last).to_have_text("u")
    visit.check_accessible()
    last = {"positions": "all_generated"}  # a single token is never fed back
    body = {"lens": {"layers": "all", **last}, "features": [{"sae": "tiny", **last}]}
    visit.open(f"jobs/{site.alice.ended(sampling={'max_tokens': 1}, **body)}")
    expect(details.get_by_text("No position was read.")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_views_fit_a_phone_and_are_accessible(
    browser: Browser, site: Site, scheme: str
) -> None:
    jobs = {
        "lens": site.alice.ended(lens={"layers": "all", "positions": "all_prompt"}),
        "features": site.alice.ended(features=[{"sae": "tiny"}]),
        "probes": site.alice.ended(probes=[{"probe": "calm", "tokens": True}]),
    }
    with visiting(browser, site.url, NARROW, scheme) as visit:
        visit.log_in(site.alice)
        for view in VIEWS:
            visit.open(view + (f"/{jobs[view]}" if view in jobs else ""))
            shown = ".finding" if view in jobs else "main form, main article, main table, main code"
            expect(visit.page.locator(shown).first).to_be_visible()
            if view == "attention":
                expect(visit.page.get_by_role("region", name="What it shows")).to_be_visible()
            visit.check_shown()
            visit.check_apart()


def dosed(site: Site, **effect: Any) -> JobResult:
    """The result of a dose of two layers and two scales."""
    with Client(site.url, api_key=site.alice.key) as client:
        return client.dose(
            model="fake-model",
            prompts=["hello", "you"],
            steering=[{"vector": [1.0] * HIDDEN}],
            layers="1-2",
            scales=[-0.5, 0.5],
            effect=effect,
            held_out=["hello there"],
            max_tokens=8,
        )


def test_a_dose_says_what_raises_and_what_lowers_the_effect(site: Site, visit: Visit) -> None:
    """It is not told which of them is wanted: the farthest cell is no better than another."""
    job = dosed(site, target="a").id
    result = site.alice.get(f"/v1/jobs/{job}/result")
    dose = result["dose"]
    dose["unsteered"]["effect"] = -9.94
    for cell, effect in zip(dose["cells"], (-11.04, -9.6, -9.9, -9.41), strict=True):
        cell |= {"effect": effect, "safe": True}
    dose["safe"] = dose["cells"]
    visit.page.route(f"**/v1/jobs/{job}/result", lambda route: route.fulfill(json=result))
    page = visit.log_in(site.alice, f"dose/{job}")
    expect(page.locator(".finding")).to_contain_text(
        "The log-probability of “a” is -9.94 nats per token unsteered. At the largest safe scales, "
        "it rises most at layer 2, scale 0.5, to -9.41 nats per token, and falls most at layer 1, "
        "scale -0.5, to -11.04 nats per token. Safe up to"
    )
    expect(page.locator("li[aria-current=true]").get_by_role("button")).to_have_text("0.5")
    page.get_by_role("group", name="Layer").get_by_role("button", name="1").click()
    expect(page.locator("li[aria-current=true]").get_by_role("button")).to_have_text("0.5")


def test_a_dose_shows_effect_and_damage_by_layer_and_scale(site: Site, visit: Visit) -> None:
    result = dosed(site, words=["a"])
    visit.log_in(site.alice, f"jobs/{result.id}")
    details = visit.page.locator("section.details")
    expect(details.get_by_role("heading", name="Dose", exact=True)).to_be_visible()
    expect(details.locator(".finding")).to_contain_text("safe")
    strip = details.get_by_role("listitem").filter(
        has=visit.page.get_by_role("button", name="Scale")
    )
    expect(strip).to_have_count(3)
    expect(details.get_by_role("img", name="Damage")).to_contain_text("safe")
    said = (b"share of texts with a", b"2 prompts in each cell", b"layer 1")
    assert all(text in saved(visit.page, "Effect", "SVG") for text in said)
    expect(details.get_by_role("tab", name="Python")).to_be_visible()
    details.get_by_text("All numbers").click()
    for part in ("effect", "loss above unsteered", "repetition", "relative size"):
        table = details.get_by_role("table").filter(has_text=part)
        expect(table.locator("tbody tr")).to_have_count(2)
        expect(table.locator("tbody td")).to_have_count(4)
    visit.check_accessible()


def test_fits_show_effect_losses_and_dose_and_lenses_are_listed(site: Site, visit: Visit) -> None:
    site.stack.add("worker-g", engine="gradients-fake")
    with Client(site.url, api_key=site.operator.key) as client:
        model = "fake-model"
        tokens = [list(range(n, n + 6)) for n in range(4)] + [[7]]
        lens = client.fit_lens(model=model, name="said", prompts=tokens, rank=2, skip_first=2)
        examples = [{"prompt": f"number {n} is", "target": " even"} for n in range(12)]
        fields = {"model": model, "method": "vector", "layers": [1, 2], "examples": examples}
        always = {"steps": 20, "learning_rate": 0.1, "register": "always"}
        even = client.fit_module(name="even", **fields, **always).training
        odd = client.fit_module(name="odd", **fields, steps=1, register="never")
    page = visit.log_in(site.operator, f"jobs/{even.job}")
    details = page.get_by_role("region", name="even: vector")
    expect(details.locator(".finding")).to_have_text("even is registered.")
    effect = details.locator(".stat").filter(has_text="Held-out effect")
    expect(effect).to_contain_text(f"{even.effect.before:.2f} → {even.effect.after:.2f} nats")
    layers = details.get_by_role("table", name="Effect by layer").locator("tbody tr")
    shares = [f"{site.layer}{100 * site.dose:.0f} %" for site in even.sites]
    expect(layers).to_have_text(shares)
    for title in ("Training loss", "Validation loss"):
        expect(details.get_by_role("img", name=f"{title}: ")).to_be_visible()
    visit.check_accessible()
    visit.open(f"jobs/{odd.training.job}")
    expect(page.locator(".details .finding")).to_have_text(f"odd is not registered: {odd.reason}.")
    assert lens.fit is not None
    visit.open(f"jobs/{Path(lens.path).name.rpartition('-')[0]}")
    expect(page.locator(".details .stat").filter(has_text="Prompts")).to_contain_text(
        "1 prompt too short"
    )
    visit.open("modules")
    card = page.get_by_role("article", name="said")
    expect(card).to_contain_text("layers 0-2 · sketched, of 4 prompts")
    card.get_by_text("Details").click()
    expect(card).to_contain_text(f"up to {100 * max(lens.fit.errors):.0f} %, stated")
    card.get_by_role("link", name="Use said").click()
    expect(page.get_by_label("Lens", exact=True)).to_have_value("^said")
    page.get_by_label("Layers").fill("0-2")
    page.get_by_role("button", name="Read the layers").click()
    expect(page.get_by_role("group", name="Top token by layer and position")).to_be_visible()
    site.stack.end("worker-g")
