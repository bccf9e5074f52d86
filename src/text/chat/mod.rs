//! Conversations: messages to token ids, and the tokens of a reply to what they say (`numerics.md` §15).
//!
//! An encoding is a function of the messages and nothing else. Only the control tokens that the family's layout puts there become
//! control tokens: whatever messages and tools say stays text. Their ids are those of the checkpoint's tokenizer, found by their
//! text; one that a vocabulary lacks is missed only when a conversation needs it.
//!
//! Without reasoning, a conversation and the beginning of its reply are a prefix of the conversation that goes on from there, so a
//! session that has read the one goes on with the other. Reasoning ends that: the family does not show it again, except in
//! conversations with tools.

mod json;
mod reply;
mod request;
mod talk;

pub use reply::{Delta, Reply};
pub use talk::Talk;

use crate::text::Tokenizer;
use crate::{Error, Result};
use json::Json;

/// How thorough reasoning is asked to be where nothing else is said.
const EFFORT: u32 = 75;

/// A conversation whose reply is to be made.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    messages: Vec<Message>,
    /// Functions that may be called, as their definitions say.
    tools: Vec<Tool>,
    /// Whether the reply has to be a call.
    must_call: bool,
    /// How thorough the reasoning before the reply is to be, from 1 to 100; none without reasoning.
    effort: Option<u32>,
}

#[derive(Debug, Clone, PartialEq)]
enum Message {
    System(String),
    User(String),
    Assistant {
        content: String,
        reasoning: String,
        calls: Vec<Call>,
        /// Whether the reply goes on from here.
        prefix: bool,
    },
    Tool {
        call: String,
        content: String,
    },
}

#[derive(Debug, Clone, PartialEq)]
struct Call {
    id: String,
    name: String,
    arguments: String,
}

#[derive(Debug, Clone, PartialEq)]
struct Tool {
    name: String,
    description: String,
    parameters: Json,
}

/// Control tokens of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Control {
    Bos,
    Eos,
    System,
    User,
    Assistant,
    Think,
    EndThink,
    Dsml,
}

impl Control {
    fn text(self) -> &'static str {
        match self {
            Self::Bos => "<｜begin▁of▁sentence｜>",
            Self::Eos => "<｜end▁of▁sentence｜>",
            Self::System => "<｜System｜>",
            Self::User => "<｜User｜>",
            Self::Assistant => "<｜Assistant｜>",
            Self::Think => "<think>",
            Self::EndThink => "</think>",
            Self::Dsml => "｜DSML｜",
        }
    }

    fn id(self, tokenizer: &Tokenizer) -> Result<u32> {
        tokenizer.token_to_id(self.text()).ok_or_else(|| Error::Tokenizer {
            found: format!("a vocabulary without `{}`", self.text()),
            allowed: "one with the control tokens that the conversation needs".into(),
        })
    }
}

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq)]
enum Segment {
    Control(Control),
    Text(String),
}

/// What a conversation is read as: control tokens, and text between them that is encoded as text.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prompt(Vec<Segment>);

impl Prompt {
    /// The parts in their order, and whether each is a control token.
    pub fn parts(&self) -> impl Iterator<Item = (&str, bool)> {
        self.0.iter().map(|segment| match segment {
            Segment::Control(control) => (control.text(), true),
            Segment::Text(text) => (text.as_str(), false),
        })
    }

    /// Its ids.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for a control token that the vocabulary lacks.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for segment in &self.0 {
            match segment {
                Segment::Text(text) => ids.extend(tokenizer.encode(text)?),
                Segment::Control(control) => ids.push(control.id(tokenizer)?),
            }
        }
        Ok(ids)
    }

    fn control(&mut self, control: Control) {
        self.0.push(Segment::Control(control));
    }

    /// Text that goes on from text is one part with it, and is encoded as one.
    fn text(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Segment::Text(before)) => before.push_str(text),
            _ => self.0.push(Segment::Text(text.into())),
        }
    }

    /// A template of our own, in which `{d}`, `{t}` and `{/t}` are control tokens.
    fn template(&mut self, template: &str) {
        let marks = [("{d}", Control::Dsml), ("{t}", Control::Think), ("{/t}", Control::EndThink)];
        let mut rest = template;
        let next = |rest: &str| {
            marks
                .iter()
                .filter_map(|(mark, control)| Some((rest.find(mark)?, *mark, *control)))
                .min_by_key(|(at, ..)| *at)
        };
        while let Some((at, mark, control)) = next(rest) {
            self.text(&rest[..at]);
            self.control(control);
            rest = &rest[at + mark.len()..];
        }
        self.text(rest);
    }
}

const TOOLS_BEFORE: &str = r#"

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{d} calls>" block like the following:

<{d} calls>
<{d} invoke name="$TOOL_NAME">
<{d} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{d} parameter>
...
</{d} invoke>
<{d} invoke name="$TOOL_NAME2">
...
</{d} invoke>
</{d} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {t}), you MUST output your complete reasoning inside {t}...{/t} BEFORE any tool calls or final response.

Otherwise, output directly after {/t} with tool calls or final response.

### Available Tool Schemas

"#;

const TOOLS_AFTER: &str =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";

impl Chat {
    /// Reads a request: `messages`, and `tools`, `tool_choice`, `thinking`, `reasoning_effort` if there are any. Other fields
    /// are not looked at.
    ///
    /// # Errors
    /// [`Error::Argument`] names the field.
    pub fn from_json(json: &str) -> Result<Self> {
        request::read(json)
    }

    /// The ids of the conversation, up to where the reply begins.
    ///
    /// # Errors
    /// As [`Prompt::encode`].
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        self.prompt().encode(tokenizer)
    }

    /// What listens to the reply.
    pub fn reply(&self) -> Reply {
        let calls = !self.tools.is_empty();
        let start = match (self.messages.last(), self.effort) {
            _ if self.must_call => reply::Start::Calls,
            (Some(Message::Assistant { prefix: true, content, .. }), _) if !content.is_empty() => reply::Start::Content,
            (Some(Message::Assistant { prefix: true, reasoning, .. }), Some(_)) if !reasoning.is_empty() => {
                reply::Start::MoreReasoning
            }
            (_, Some(_)) => reply::Start::Reasoning,
            (_, None) => reply::Start::Reply,
        };
        Reply::new(start, calls)
    }

    /// The conversation in the family's layout.
    pub fn prompt(&self) -> Prompt {
        let mut prompt = Prompt::default();
        prompt.control(Control::Bos);
        let mut rest = &self.messages[..];
        // What belongs to the first system message is written before all others, be there one or not.
        let first = match rest {
            [Message::System(text), others @ ..] => {
                rest = others;
                Some(text.as_str())
            }
            _ => None,
        };
        if first.is_some() || self.effort.is_some() || !self.tools.is_empty() {
            prompt.control(Control::System);
            if let Some(effort) = self.effort {
                prompt.text(&format!(
                    "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
                ));
            }
            prompt.text(first.unwrap_or_default());
            self.describe_tools(&mut prompt);
        }
        let mut before = None;
        for message in rest {
            self.message(&mut prompt, message, before);
            before = Some(message);
        }
        if !matches!(before, Some(Message::Assistant { prefix: true, .. })) {
            prompt.control(Control::Assistant);
            prompt.control(if self.effort.is_some() { Control::Think } else { Control::EndThink });
        }
        if self.must_call {
            prompt.template("\n\n<{d} calls>\n");
        }
        prompt
    }

    fn describe_tools(&self, prompt: &mut Prompt) {
        if self.tools.is_empty() {
            return;
        }
        prompt.template(TOOLS_BEFORE);
        let schemas: Vec<String> = self
            .tools
            .iter()
            .map(|tool| {
                let (name, description) = (json::quoted(&tool.name), json::quoted(&tool.description));
                format!("{{\"name\": {name}, \"description\": {description}, \"parameters\": {}}}", tool.parameters)
            })
            .collect();
        prompt.text(&schemas.join("\n"));
        prompt.text(TOOLS_AFTER);
    }

    fn message(&self, prompt: &mut Prompt, message: &Message, before: Option<&Message>) {
        let turn = |prompt: &mut Prompt| match before {
            Some(Message::User(_) | Message::Tool { .. }) => prompt.text("\n\n"),
            _ => prompt.control(Control::User),
        };
        match message {
            Message::System(text) => {
                prompt.control(Control::System);
                prompt.text(text);
            }
            Message::User(text) => {
                turn(prompt);
                prompt.text(text);
            }
            Message::Tool { content, .. } => {
                turn(prompt);
                prompt.text(&format!("<tool_result>{content}</tool_result>"));
            }
            Message::Assistant { content, reasoning, calls, prefix } => {
                prompt.control(Control::Assistant);
                // Reasoning of before is kept when there are tools, for the calls that follow from it.
                if self.effort.is_some() && (*prefix || !self.tools.is_empty()) {
                    prompt.control(Control::Think);
                    prompt.text(reasoning);
                    if !(*prefix && content.is_empty() && calls.is_empty()) {
                        prompt.control(Control::EndThink);
                    }
                } else {
                    prompt.control(Control::EndThink);
                }
                prompt.text(content);
                write_calls(prompt, calls);
                if !prefix {
                    prompt.control(Control::Eos);
                }
            }
        }
    }
}

fn write_calls(prompt: &mut Prompt, calls: &[Call]) {
    if calls.is_empty() {
        return;
    }
    prompt.template("\n\n<{d} calls>\n");
    for call in calls {
        prompt.template("<{d} invoke name=\"");
        prompt.text(&call.name);
        prompt.text("\">\n");
        // Arguments that are no object are passed on as they are.
        let arguments = match serde_json::from_str(&call.arguments) {
            Ok(Json::Object(fields)) => fields,
            _ => vec![("arguments".into(), Json::String(call.arguments.clone()))],
        };
        for (i, (key, value)) in arguments.iter().enumerate() {
            if i > 0 {
                prompt.text("\n");
            }
            prompt.template("<{d} parameter name=\"");
            prompt.text(key);
            match value.as_str() {
                Some(text) => prompt.text(&format!("\" string=\"true\">{text}")),
                None => prompt.text(&format!("\" string=\"false\">{value}")),
            }
            prompt.template("</{d} parameter>");
        }
        prompt.template("\n</{d} invoke>\n");
    }
    prompt.template("</{d} calls>");
}
