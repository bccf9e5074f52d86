//! Conversations: prompts and replies as an independent implementation recorded them, and what must hold for all of them.

mod support;

use std::path::PathBuf;
use std::sync::LazyLock;

use cedra::text::{Chat, Delta, Reply, Talk, Tokenizer};
use cedra::Error;
use proptest::prelude::*;
use serde_json::{json, Value};
use support::fixture;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/pocket");

static POCKET: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::open(MODEL).unwrap());

fn cases(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(fixture(name)).unwrap();
    let mut record: Value = serde_json::from_str(&text).unwrap();
    serde_json::from_value(record["cases"].take()).unwrap()
}

fn chat(request: &Value) -> Chat {
    Chat::from_json(&request.to_string()).unwrap()
}

#[test]
fn prompts_are_those_recorded() {
    let cases = cases("encoding/render.json");
    assert!(cases.len() > 40);
    for case in cases {
        let chat = Chat::from_json(case["request"].as_str().unwrap()).unwrap();
        let prompt = chat.prompt();
        let text: String = prompt.parts().map(|(text, _)| text).collect();
        assert_eq!(text, case["prompt"].as_str().unwrap(), "{}", case["name"]);
        let mut at = 0;
        let mut control = vec![];
        for (part, is_control) in prompt.parts() {
            let end = at + part.chars().count();
            if is_control {
                control.push([at, end]);
            }
            at = end;
        }
        assert_eq!(json!(control), case["special_ranges"], "{}", case["name"]);
        assert_eq!(POCKET.decode(&chat.encode(&POCKET).unwrap()).unwrap(), text);
    }
}

/// A reply as a message, of the deltas that it came in.
fn message(deltas: &[Delta]) -> Value {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), vec![]);
    for delta in deltas {
        match delta {
            Delta::Content(text) => content += text,
            Delta::Reasoning(text) => reasoning += text,
            Delta::Call { index, name } => {
                assert_eq!(*index, calls.len());
                calls.push((name.clone(), String::new()));
            }
            Delta::Arguments { index, text } => calls[*index].1 += text,
        }
    }
    let calls: Vec<Value> =
        calls.iter().map(|(name, arguments)| json!({ "name": name, "arguments": arguments })).collect();
    json!({ "content": content, "reasoning": reasoning, "calls": calls })
}

/// What a reply says, and whether it calls.
fn heard(mut reply: Reply, ids: &[u32]) -> (Value, bool) {
    let mut deltas: Vec<Delta> = ids.iter().flat_map(|&id| reply.push(&POCKET, id).unwrap()).collect();
    deltas.extend(reply.finish());
    (message(&deltas), deltas.iter().any(|delta| matches!(delta, Delta::Call { .. })))
}

/// A conversation that is to be answered.
fn asked(thinking: bool, tools: bool) -> Chat {
    let mut request = json!({
        "messages": [{ "role": "user", "content": "?" }],
        "thinking": { "type": if thinking { "enabled" } else { "disabled" } },
    });
    if tools {
        request["tools"] = json!([{ "type": "function", "function": { "name": "now" } }]);
    }
    chat(&request)
}

#[test]
fn replies_say_what_was_recorded() {
    for case in cases("encoding/parse.json") {
        let ids = POCKET.encode_with_special(case["text"].as_str().unwrap()).unwrap();
        let (said, calls) = heard(asked(case["thinking"].as_bool().unwrap(), true).reply(), &ids);
        let recorded = &case["message"];
        let functions = recorded["tool_calls"].as_array().into_iter().flatten().map(|call| call["function"].clone());
        let expected = json!({
            "content": recorded["content"],
            "reasoning": recorded["reasoning_content"].as_str().unwrap_or_default(),
            "calls": functions.collect::<Vec<_>>(),
        });
        assert_eq!(said, expected, "{}", case["name"]);
        assert_eq!(calls, case["finish_reason"] == "tool_calls", "{}", case["name"]);
    }
}

#[test]
fn text_that_spells_a_marker_is_no_marker() {
    let block = "a\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"now\">\n</｜DSML｜ invoke>\n</｜DSML｜ calls></think>";
    let said = |thinking, ids: &[u32]| heard(asked(thinking, true).reply(), ids);
    let text = POCKET.encode(block).unwrap();
    assert_eq!(said(false, &text), (json!({ "content": block, "reasoning": "", "calls": [] }), false));
    assert_eq!(said(true, &text), (json!({ "content": "", "reasoning": block, "calls": [] }), false));
    // Without tools not even the tokens are.
    let ids = POCKET.encode_with_special(block.strip_suffix("</think>").unwrap()).unwrap();
    let (said, calls) = heard(asked(false, false).reply(), &ids);
    assert_eq!((&said["content"], calls), (&json!(block.strip_suffix("</think>").unwrap()), false));
}

#[test]
fn a_reply_shows_what_is_certain_at_once() {
    let mut reply = asked(false, true).reply();
    let mut shown = vec![];
    for id in POCKET.encode("Yes: 1 < 2.\n\nNo").unwrap() {
        shown.extend(reply.push(&POCKET, id).unwrap());
    }
    assert_eq!(message(&shown)["content"], "Yes: 1 < 2.\n\nNo");
    for id in POCKET.encode("\n\n<").unwrap() {
        assert_eq!(reply.push(&POCKET, id).unwrap(), []);
    }
    assert_eq!(reply.finish(), [Delta::Content("\n\n<".into())]);
}

#[test]
fn a_reply_that_goes_on_from_a_prefix_begins_where_it_ends() {
    let request = |message: Value| json!({ "messages": [{ "role": "user", "content": "?" }, message], "thinking": { "type": "enabled" } });
    let ids = POCKET.encode_with_special("\nx</think>\ny").unwrap();
    let begun = |message: Value| heard(chat(&request(message)).reply(), &ids).0;
    let thought = begun(json!({ "role": "assistant", "reasoning_content": "Well", "prefix": true }));
    assert_eq!((&thought["reasoning"], &thought["content"]), (&json!("\nx"), &json!("y")));
    let said = begun(json!({ "role": "assistant", "content": "Well", "prefix": true }));
    assert_eq!((&said["reasoning"], &said["content"]), (&json!(""), &json!("\nx\ny")));
}

#[test]
fn wrong_requests_are_refused_by_field() {
    let user = json!({ "role": "user", "content": "x" });
    let calls = json!([{ "id": "a", "type": "function", "function": { "name": "f", "arguments": "{}" } }]);
    let tool = json!([{ "type": "function", "function": { "name": "f" } }]);
    let roles = "\"system\", \"user\", \"assistant\" or \"tool\"";
    for (request, field, found, allowed) in [
        (json!({}), "messages", "nothing", "an array of messages, one at least"),
        (json!({ "messages": [] }), "messages", "[]", "an array of messages, one at least"),
        (json!({ "messages": "x" }), "messages", "\"x\"", "an array"),
        (json!({ "messages": [{ "role": "developer", "content": "x" }] }), "messages[0].role", "\"developer\"", roles),
        (json!({ "messages": [user, "x"] }), "messages[1].role", "nothing", roles),
        (json!({ "messages": [{ "role": "user" }] }), "messages[0].content", "nothing", "a string"),
        (
            json!({ "messages": [{ "role": "assistant", "content": null }] }),
            "messages[0].content",
            "nothing",
            "a string",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }),
            "messages[0].content[0].type",
            "\"image_url\"",
            "\"text\"",
        ),
        (
            json!({ "messages": [{ "role": "tool", "tool_call_id": "a", "content": "x" }] }),
            "messages[0].tool_call_id",
            "\"a\"",
            "a tool message behind an assistant message with tool_calls",
        ),
        (
            json!({ "messages": [{ "role": "assistant", "tool_calls": calls }, { "role": "tool", "tool_call_id": "b", "content": "x" }] }),
            "messages[1].tool_call_id",
            "\"b\"",
            "the id of a call before it: a",
        ),
        (
            json!({ "messages": [{ "role": "assistant", "tool_calls": [{ "id": "a", "function": { "name": "f", "arguments": {} } }] }] }),
            "messages[0].tool_calls[0].function.arguments",
            "{}",
            "a string",
        ),
        (
            json!({ "messages": [{ "role": "assistant", "content": "x", "prefix": true }, user] }),
            "messages[0].prefix",
            "true",
            "true in the last message only",
        ),
        (
            json!({ "messages": [user], "tools": [{ "type": "retrieval" }] }),
            "tools[0].type",
            "\"retrieval\"",
            "\"function\"",
        ),
        (
            json!({ "messages": [user], "tools": [{ "function": { "name": 5 } }] }),
            "tools[0].function.name",
            "5",
            "a string",
        ),
        (
            json!({ "messages": [user], "tools": [{ "function": { "name": "f", "strict": true } }] }),
            "tools[0].function.strict",
            "true",
            "false: nothing holds a reply to a schema",
        ),
        (
            json!({ "messages": [user], "tool_choice": "required" }),
            "tool_choice",
            "\"required\"",
            "\"auto\" or \"none\", and with tools \"required\"",
        ),
        (
            json!({ "messages": [user], "tools": tool, "tool_choice": "required", "thinking": { "type": "enabled" } }),
            "tool_choice",
            "\"required\" with thinking",
            "\"required\" without thinking",
        ),
        (
            json!({ "messages": [user], "thinking": true }),
            "thinking",
            "true",
            "{\"type\": \"enabled\"} or {\"type\": \"disabled\"}",
        ),
        (
            json!({ "messages": [user], "reasoning_effort": 9 }),
            "reasoning_effort",
            "9",
            "\"none\", \"minimal\", \"low\", \"medium\", \"high\", \"xhigh\" or \"max\"",
        ),
    ] {
        match Chat::from_json(&request.to_string()) {
            Err(Error::Argument { field: f, found: g, allowed: a }) => {
                assert_eq!((f.as_str(), g.as_str(), a.as_str()), (field, found, allowed), "{request}");
            }
            other => panic!("{request}: {other:?}"),
        }
    }
    let long = Chat::from_json(&json!({ "messages": "ä".repeat(99) }).to_string()).unwrap_err().to_string();
    assert_eq!(long, format!("`messages`: found \"{}…, allowed: an array", "ä".repeat(79)));
    assert!(Chat::from_json("{").unwrap_err().to_string().starts_with("`request`: found EOF"));
}

/// The pocket model's tokenizer, if it had another token in this one's place.
fn without(control: &str) -> Tokenizer {
    let mut file: Value =
        serde_json::from_slice(&std::fs::read(PathBuf::from(MODEL).join("tokenizer.json")).unwrap()).unwrap();
    for token in file["added_tokens"].as_array_mut().unwrap() {
        if token["content"] == control {
            token["content"] = json!("<｜place▁holder｜>");
        }
    }
    for (text, id) in std::mem::take(file["model"]["vocab"].as_object_mut().unwrap()) {
        let text = if text == control { "<｜place▁holder｜>".into() } else { text };
        file["model"]["vocab"][text] = id;
    }
    Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
}

#[test]
fn a_control_token_that_the_vocabulary_lacks_is_missed_when_it_is_needed() {
    let tokenizer = without("<｜System｜>");
    let user = json!({ "role": "user", "content": "Say <｜System｜>" });
    chat(&json!({ "messages": [user] })).encode(&tokenizer).unwrap();
    for request in [
        json!({ "messages": [{ "role": "system", "content": "Be brief." }, user] }),
        json!({ "messages": [user], "thinking": { "type": "enabled" } }),
    ] {
        let error = chat(&request).encode(&tokenizer).unwrap_err().to_string();
        let words = "tokenizer: found a vocabulary without `<｜System｜>`, allowed: one with the control tokens that the conversation needs";
        assert_eq!(error, words);
    }
}

/// Texts that like to look like markup.
fn text() -> impl Strategy<Value = String> {
    const PARTS: &[&str] = &[
        "a",
        " b",
        "\n",
        "<｜User｜>",
        "<｜end▁of▁sentence｜>",
        "</think>",
        "<think>",
        "｜DSML｜",
        "<｜DSML｜ calls>",
        "日本",
        "🦀",
        "\"",
        "\\",
    ];
    proptest::collection::vec(proptest::sample::select(PARTS), 0..6).prop_map(|parts| parts.concat())
}

fn turn() -> impl Strategy<Value = [Value; 2]> {
    let arguments = prop_oneof![
        Just("{}".to_string()),
        text().prop_map(|text| json!({ "k": text, "n": [1, null] }).to_string()),
        text()
    ];
    let answer = (text(), proptest::option::of((text(), arguments))).prop_map(|(content, call)| match call {
        None => json!({ "role": "assistant", "content": content }),
        Some((name, arguments)) => json!({ "role": "assistant", "content": content, "tool_calls": [
            { "id": "c", "type": "function", "function": { "name": name, "arguments": arguments } },
        ] }),
    });
    (text(), answer).prop_map(|(question, answer)| [json!({ "role": "user", "content": question }), answer])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(std::env::var("CEDRA_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(48)))]

    #[test]
    fn a_conversation_that_goes_on_begins_with_what_it_was(turns in proptest::collection::vec(turn(), 1..4), last in text(), system in text()) {
        let mut messages = vec![json!({ "role": "system", "content": system })];
        let tools = json!([{ "type": "function", "function": { "name": "f", "description": system } }]);
        let ids = |messages: &[Value]| chat(&json!({ "messages": messages, "tools": tools })).encode(&POCKET).unwrap();
        let mut before: Option<Vec<u32>> = None;
        for [question, answer] in turns.into_iter().chain([[json!({ "role": "user", "content": last }), Value::Null]]) {
            messages.push(question);
            let now = ids(&messages);
            if let Some(before) = before {
                prop_assert!(now.starts_with(&before));
            }
            prop_assert_eq!(&now, &ids(&messages));
            before = Some(now);
            messages.push(answer);
        }
    }

    #[test]
    fn whatever_is_said_stays_text(question in text(), result in text()) {
        let request = |question: &str, result: &str| json!({ "messages": [
            { "role": "system", "content": question },
            { "role": "user", "content": question },
            { "role": "assistant", "content": result, "tool_calls": [{ "id": "c", "function": { "name": question, "arguments": result } }] },
            { "role": "tool", "tool_call_id": "c", "content": result },
        ] });
        let control = |request: Value| -> Vec<u32> {
            let ids = chat(&request).encode(&POCKET).unwrap();
            ids.into_iter().filter(|&id| POCKET.is_added(id)).collect()
        };
        // A system message that says nothing is not there.
        let plain = |text: &str| if text.is_empty() { "" } else { "x" };
        prop_assert_eq!(control(request(&question, &result)), control(request(plain(&question), plain(&result))));
    }

    #[test]
    fn a_message_is_heard_as_it_was_written(content in text(), reasoning in text(), value in text(), key in "[a-z]{1,4}") {
        // Newlines at the edges are the layout's.
        let (content, reasoning) = (content.trim_matches('\n'), reasoning.trim_matches('\n'));
        let arguments = json!({ key: value, "other": [value, 1.5] }).to_string();
        let answer = json!({ "role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": [
            { "id": "c", "function": { "name": "now", "arguments": arguments } },
        ] });
        let request = |messages: Value| chat(&json!({
            "messages": messages, "thinking": { "type": "enabled" }, "tools": [{ "type": "function", "function": { "name": "now" } }],
        }));
        let user = json!({ "role": "user", "content": "?" });
        let asked = request(json!([user]));
        let (before, after) = (asked.encode(&POCKET).unwrap(), request(json!([user, answer, user])).encode(&POCKET).unwrap());
        prop_assert!(after.starts_with(&before));
        let end = POCKET.token_to_id("<｜end▁of▁sentence｜>").unwrap();
        let reply: Vec<u32> = after[before.len()..].iter().copied().take_while(|&id| id != end).collect();
        let (said, calls) = heard(asked.reply(), &reply);
        prop_assert!(calls);
        prop_assert_eq!(&said["content"], content);
        prop_assert_eq!(&said["reasoning"], reasoning);
        let heard: Value = serde_json::from_str(said["calls"][0]["arguments"].as_str().unwrap()).unwrap();
        prop_assert_eq!(heard, serde_json::from_str::<Value>(&arguments).unwrap());
    }
}

/// A text that grows by what is said is the encoded conversation, token for token.
#[test]
fn a_conversation_that_grows_is_the_encoded_one() {
    let talk = Talk::new(&POCKET).unwrap();
    let turns = [("One: <｜User｜>?", "1\n\nand more"), ("Two\nlines", "")];
    let mut text = vec![];
    for (question, answer) in turns {
        text.extend(talk.ask(&POCKET, &text, question).unwrap());
        text.extend(POCKET.encode(answer).unwrap());
    }
    // An answer that was not ended is ended by the next question.
    text.extend(talk.ask(&POCKET, &text, "Three").unwrap());
    let said = |role: &str, text: &str| json!({ "role": role, "content": text });
    let before = turns.iter().flat_map(|(question, answer)| [said("user", question), said("assistant", answer)]);
    let messages: Vec<Value> = before.chain([said("user", "Three")]).collect();
    assert_eq!(text, chat(&json!({ "messages": messages })).encode(&POCKET).unwrap());
}

#[test]
fn only_an_end_of_its_own_ends_an_answer() {
    let talk = Talk::new(&POCKET).unwrap();
    let id = |text: &str| POCKET.token_to_id(text).unwrap();
    let stops = talk.stop_ids();
    for control in ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"]
    {
        assert!(stops.contains(&id(control)), "{control}");
        assert_eq!(talk.ends(id(control)), control == "<｜end▁of▁sentence｜>");
    }
    assert_eq!(Talk::new(&without("<｜System｜>")).unwrap().stop_ids().len(), stops.len() - 1);
    let error = Talk::new(&without("<｜User｜>")).unwrap_err().to_string();
    assert!(error.contains("a vocabulary without `<｜User｜>`"), "{error}");
}

/// What is done to a conversation.
#[derive(Debug, Clone)]
enum Act {
    Load(String),
    /// A question, an answer, and whether it came to its end.
    Ask(String, String, bool),
}

fn act() -> impl Strategy<Value = Act> {
    // Blank lines, spelled control tokens, characters of several bytes.
    let text =
        || proptest::collection::vec(prop_oneof!["[a-z]{1,4}", "\n{1,3}", "[ é#]", "<｜User｜>|<｜Assistant｜>"], 1..8);
    let text = move || text().prop_map(|parts| format!("{}.", parts.concat()));
    prop_oneof![
        text().prop_map(Act::Load),
        (text(), text(), any::<bool>()).prop_map(|(question, answer, ended)| Act::Ask(question, answer, ended)),
    ]
}

proptest! {
    /// Taking back leads to where the text was before each question, and before the documents that no question follows.
    #[test]
    fn what_was_said_is_taken_back_in_order(acts in proptest::collection::vec(act(), 1..7)) {
        let talk = Talk::new(&POCKET).unwrap();
        let (mut text, mut marks): (Vec<u32>, Vec<usize>) = (vec![], vec![]);
        let mut loaded = false;
        for act in &acts {
            match act {
                Act::Load(document) => {
                    let ids = talk.load(&POCKET, &text, "title", document).unwrap();
                    let opened = ids.iter().position(|&id| id == POCKET.token_to_id("<｜User｜>").unwrap());
                    prop_assert_eq!(opened.is_none(), loaded);
                    marks.extend(opened.map(|at| text.len() + at));
                    text.extend(ids);
                    loaded = true;
                }
                Act::Ask(question, answer, ended) => {
                    let ids = talk.ask(&POCKET, &text, question).unwrap();
                    let opened = ids.iter().position(|&id| id == POCKET.token_to_id("<｜User｜>").unwrap());
                    marks.push(text.len() + opened.unwrap_or(0));
                    text.extend(ids);
                    text.extend(POCKET.encode(answer).unwrap());
                    if *ended {
                        text.push(POCKET.token_to_id("<｜end▁of▁sentence｜>").unwrap());
                    }
                    loaded = false;
                }
            }
        }
        while let Some(mark) = marks.pop() {
            prop_assert_eq!(talk.undo(&POCKET, &text).unwrap(), Some(mark));
            text.truncate(mark);
        }
        prop_assert_eq!(talk.undo(&POCKET, &text).unwrap(), None);
    }
}
