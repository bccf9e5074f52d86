//! Conversations.

use std::rc::Rc;

use js_sys::Uint32Array;
use serde_json::{json, Value};
use wasm_bindgen::prelude::*;

use super::engine::{Place, WasmEngine};
use super::error::{alive, to_js};
use crate::text::{Chat, Delta, Reply};

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
export type ReplyDelta =
  | { type: "reasoning"; text: string }
  | { type: "content"; text: string }
  | { type: "call"; index: number; name: string }
  | { type: "arguments"; index: number; text: string };
"#;

#[wasm_bindgen]
impl WasmEngine {
    /// Ids of a conversation, up to where its reply begins. The request is JSON: `messages`, `tools`, `tool_choice`, `thinking`,
    /// `reasoning_effort`.
    ///
    /// # Errors
    /// Those of the request, and of a vocabulary without the control tokens that it needs.
    #[wasm_bindgen(js_name = encodeChat)]
    pub fn encode_chat(&self, request: &str) -> Result<Uint32Array, JsValue> {
        alive()?;
        Ok(Chat::from_json(request)?.encode(&self.place.tokenizer)?.as_slice().into())
    }

    /// What listens to the reply of a conversation.
    ///
    /// # Errors
    /// Those of the request.
    pub fn reply(&self, request: &str) -> Result<WasmReply, JsValue> {
        alive()?;
        Ok(WasmReply { place: self.place.clone(), reply: Chat::from_json(request)?.reply() })
    }
}

/// Listens to a reply.
#[wasm_bindgen]
pub struct WasmReply {
    place: Rc<Place>,
    reply: Reply,
}

#[wasm_bindgen]
impl WasmReply {
    /// What some tokens of the reply say.
    ///
    /// # Errors
    /// For an id that the vocabulary does not have.
    #[wasm_bindgen(unchecked_return_type = "ReplyDelta[]")]
    pub fn push(&mut self, ids: Vec<u32>) -> Result<JsValue, JsValue> {
        alive()?;
        let mut deltas = vec![];
        for id in ids {
            deltas.extend(self.reply.push(&self.place.tokenizer, id)?);
        }
        Ok(told(&deltas))
    }

    /// What was held back, once the reply is over.
    #[wasm_bindgen(unchecked_return_type = "ReplyDelta[]")]
    pub fn finish(&mut self) -> JsValue {
        told(&self.reply.finish())
    }
}

fn told(deltas: &[Delta]) -> JsValue {
    let deltas: Value = deltas
        .iter()
        .map(|delta| match delta {
            Delta::Reasoning(text) => json!({ "type": "reasoning", "text": text }),
            Delta::Content(text) => json!({ "type": "content", "text": text }),
            Delta::Call { index, name } => json!({ "type": "call", "index": index, "name": name }),
            Delta::Arguments { index, text } => json!({ "type": "arguments", "index": index, "text": text }),
        })
        .collect();
    to_js(&deltas)
}
