//! Requests as clients send them, read with an error that names the field.

use super::json::Json;
use super::{Call, Chat, Message, Tool, EFFORT};
use crate::{Error, Result};

pub(super) fn read(text: &str) -> Result<Chat> {
    let json: Json = serde_json::from_str(text).map_err(|error| refused("request", error, "JSON"))?;
    let tools = match present(&json, "tools") {
        None => vec![],
        Some(tools) => each("tools", tools, tool)?,
    };
    let (tools, must_call) = match present(&json, "tool_choice") {
        None => (tools, false),
        Some(choice) => match choice.as_str() {
            Some("auto") => (tools, false),
            Some("none") => (vec![], false),
            Some("required") if !tools.is_empty() => (tools, true),
            _ => return Err(refused("tool_choice", choice, "\"auto\" or \"none\", and with tools \"required\"")),
        },
    };
    let thinks = match present(&json, "thinking") {
        None => false,
        Some(thinking) => match thinking.get("type").and_then(Json::as_str) {
            Some("enabled") => true,
            Some("disabled") => false,
            _ => return Err(refused("thinking", thinking, "{\"type\": \"enabled\"} or {\"type\": \"disabled\"}")),
        },
    };
    let effort = match present(&json, "reasoning_effort") {
        None => EFFORT,
        Some(effort) => match effort.as_str() {
            Some("minimal" | "low") => 50,
            Some("none" | "medium" | "high" | "xhigh") => EFFORT,
            Some("max") => 100,
            _ => {
                let allowed = "\"none\", \"minimal\", \"low\", \"medium\", \"high\", \"xhigh\" or \"max\"";
                return Err(refused("reasoning_effort", effort, allowed));
            }
        },
    };
    if must_call && thinks {
        return Err(refused("tool_choice", "\"required\" with thinking", "\"required\" without thinking"));
    }
    let messages = match present(&json, "messages") {
        None => return Err(refused("messages", "nothing", "an array of messages, one at least")),
        Some(messages) => each("messages", messages, message)?,
    };
    if messages.is_empty() {
        return Err(refused("messages", "[]", "an array of messages, one at least"));
    }
    check(&messages)?;
    Ok(Chat { messages: arranged(messages), tools, must_call, effort: thinks.then_some(effort) })
}

/// What a message is held against its neighbours for.
fn check(messages: &[Message]) -> Result<()> {
    let mut calls: Vec<&str> = vec![];
    for (i, message) in messages.iter().enumerate() {
        match message {
            Message::Assistant { prefix: true, .. } if i + 1 < messages.len() => {
                return Err(refused(&format!("messages[{i}].prefix"), "true", "true in the last message only"));
            }
            Message::Assistant { calls: made, .. } => calls = made.iter().map(|call| call.id.as_str()).collect(),
            Message::Tool { call, .. } if !calls.contains(&call.as_str()) => {
                let allowed = match calls.is_empty() {
                    true => "a tool message behind an assistant message with tool_calls".into(),
                    false => format!("the id of a call before it: {}", calls.join(" or ")),
                };
                return Err(refused(&format!("messages[{i}].tool_call_id"), format!("\"{call}\""), &allowed));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Empty system messages go, users who follow each other are one, and results come in the order of their calls.
fn arranged(messages: Vec<Message>) -> Vec<Message> {
    let mut arranged: Vec<Message> = Vec::new();
    for message in messages {
        match (arranged.last_mut(), message) {
            (_, Message::System(text)) if text.is_empty() => {}
            (Some(Message::User(before)), Message::User(text)) => {
                before.push_str("\n\n");
                before.push_str(&text);
            }
            (_, message) => arranged.push(message),
        }
    }
    let mut order: Vec<String> = vec![];
    let turn = |message: &Message| matches!(message, Message::User(_) | Message::Tool { .. });
    for run in arranged.chunk_by_mut(|a, b| turn(a) && turn(b)) {
        if let [Message::Assistant { calls, .. }] = run {
            order = calls.iter().map(|call| call.id.clone()).collect();
            continue;
        }
        // Results change places among themselves; what a user says between them stays where it is.
        let places: Vec<usize> = (0..run.len()).filter(|&i| matches!(run[i], Message::Tool { .. })).collect();
        let mut results: Vec<Message> = places.iter().map(|&i| run[i].clone()).collect();
        results.sort_by_key(|result| match result {
            Message::Tool { call, .. } => order.iter().position(|id| id == call),
            _ => None,
        });
        places.into_iter().zip(results).for_each(|(i, result)| run[i] = result);
    }
    arranged
}

fn message(at: &str, json: &Json) -> Result<Message> {
    let role = present(json, "role");
    match role.and_then(Json::as_str) {
        Some("system") => Ok(Message::System(content(at, json, false)?)),
        Some("user") => Ok(Message::User(content(at, json, false)?)),
        Some("assistant") => {
            let calls = match present(json, "tool_calls") {
                None => vec![],
                Some(calls) => each(&format!("{at}.tool_calls"), calls, call)?,
            };
            let prefix = match present(json, "prefix") {
                None => false,
                Some(Json::Bool(prefix)) => *prefix,
                Some(other) => return Err(refused(&format!("{at}.prefix"), other, "true or false")),
            };
            let reasoning = match present(json, "reasoning_content") {
                None => String::new(),
                Some(text) => string(&format!("{at}.reasoning_content"), Some(text))?,
            };
            let silent = !calls.is_empty() || (prefix && !reasoning.is_empty());
            Ok(Message::Assistant { content: content(at, json, silent)?, reasoning, calls, prefix })
        }
        Some("tool") => Ok(Message::Tool {
            call: string(&format!("{at}.tool_call_id"), present(json, "tool_call_id"))?,
            content: content(at, json, false)?,
        }),
        _ => {
            let allowed = "\"system\", \"user\", \"assistant\" or \"tool\"";
            Err(match role {
                Some(role) => refused(&format!("{at}.role"), role, allowed),
                None => refused(&format!("{at}.role"), "nothing", allowed),
            })
        }
    }
}

/// A text, or parts that are texts. `silent`: whether a message may have none.
fn content(at: &str, json: &Json, silent: bool) -> Result<String> {
    let at = format!("{at}.content");
    match present(json, "content") {
        None if silent => Ok(String::new()),
        Some(Json::Array(parts)) => {
            let text = |at: &str, part: &Json| match part.get("type").and_then(Json::as_str) {
                Some("text") => string(&format!("{at}.text"), present(part, "text")),
                _ => {
                    let kind = part.get("type").unwrap_or(part);
                    Err(refused(&format!("{at}.type"), kind, "\"text\""))
                }
            };
            Ok(each(&at, &Json::Array(parts.clone()), text)?.join("\n\n"))
        }
        text => string(&at, text),
    }
}

fn call(at: &str, json: &Json) -> Result<Call> {
    let (id, function) = (string(&format!("{at}.id"), present(json, "id"))?, function(at, json)?);
    let at = format!("{at}.function");
    let name = string(&format!("{at}.name"), present(function, "name"))?;
    let arguments = string(&format!("{at}.arguments"), present(function, "arguments"))?;
    Ok(Call { id, name, arguments })
}

fn tool(at: &str, json: &Json) -> Result<Tool> {
    let function = function(at, json)?;
    let at = format!("{at}.function");
    let name = string(&format!("{at}.name"), present(function, "name"))?;
    let description = match present(function, "description") {
        None => String::new(),
        Some(text) => string(&format!("{at}.description"), Some(text))?,
    };
    let parameters = match present(function, "parameters") {
        None => Json::Object(vec![
            ("type".into(), Json::String("object".into())),
            ("properties".into(), Json::Object(vec![])),
        ]),
        Some(schema @ Json::Object(_)) => schema.clone(),
        Some(other) => return Err(refused(&format!("{at}.parameters"), other, "a JSON schema")),
    };
    match present(function, "strict") {
        None | Some(Json::Bool(false)) => Ok(Tool { name, description, parameters }),
        Some(other) => Err(refused(&format!("{at}.strict"), other, "false: nothing holds a reply to a schema")),
    }
}

fn function<'a>(at: &str, json: &'a Json) -> Result<&'a Json> {
    match present(json, "type") {
        Some(kind) if kind.as_str() != Some("function") => {
            return Err(refused(&format!("{at}.type"), kind, "\"function\""));
        }
        _ => {}
    }
    let found = present(json, "function");
    match found {
        Some(function @ Json::Object(_)) => Ok(function),
        Some(other) => Err(refused(&format!("{at}.function"), other, "an object")),
        None => Err(refused(&format!("{at}.function"), "nothing", "an object")),
    }
}

/// A field that is there and not null.
fn present<'a>(json: &'a Json, field: &str) -> Option<&'a Json> {
    json.get(field).filter(|value| **value != Json::Null)
}

fn string(at: &str, json: Option<&Json>) -> Result<String> {
    match json {
        Some(Json::String(text)) => Ok(text.clone()),
        Some(other) => Err(refused(at, other, "a string")),
        None => Err(refused(at, "nothing", "a string")),
    }
}

fn each<T>(at: &str, json: &Json, read: impl Fn(&str, &Json) -> Result<T>) -> Result<Vec<T>> {
    match json {
        Json::Array(items) => items.iter().enumerate().map(|(i, item)| read(&format!("{at}[{i}]"), item)).collect(),
        other => Err(refused(at, other, "an array")),
    }
}

/// What was found is shown as far as a line holds.
fn refused(field: &str, found: impl ToString, allowed: &str) -> Error {
    let mut found = found.to_string();
    if let Some((end, _)) = found.char_indices().nth(80) {
        found.truncate(end);
        found.push('…');
    }
    Error::Argument { field: field.into(), found, allowed: allowed.into() }
}
