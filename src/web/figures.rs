//! What a page draws: what the last token attended to, which n-grams were looked up. Asking changes nothing, and ends no generation.

use js_sys::{Promise, Reflect, Uint32Array};
use serde_json::{json, Value};
use std::ops::Range;
use wasm_bindgen::prelude::*;

use super::error::{promise, set, to_js};
use super::options::whole;
use super::session::WasmSession;
use crate::model::LayerAttention;

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
export interface Attention {
  /** Position of the token that was read. */
  position: number;
  layers: Array<{ window: [number, number]; ratio: number; entries: Uint32Array; candidates?: Array<[number, number]> }>;
}
export interface Ngrams {
  layer: number;
  /** By order, from 2 on: rows of the table, one a hash head. */
  rows: number[][];
}
"#;

#[wasm_bindgen]
impl WasmSession {
    /// What the last step that made a token attended to; nothing where another step has written over what it left.
    #[wasm_bindgen(unchecked_return_type = "Promise<Attention | undefined>")]
    pub fn attention(&self) -> Promise {
        let turn = self.turn();
        promise(async move {
            let session = turn.await?;
            let Some(attention) = session.state()?.attention_async().await? else { return Ok(JsValue::UNDEFINED) };
            let told = to_js(&json!({
                "position": attention.position,
                "layers": attention.layers.iter().map(layer).collect::<Value>(),
            }));
            let layers: js_sys::Array = Reflect::get(&told, &"layers".into())?.into();
            for (told, layer) in layers.iter().zip(&attention.layers) {
                set(&told, "entries", &Uint32Array::from(layer.entries.as_slice()));
            }
            Ok(told)
        })
    }

    /// The n-grams that end at a position, as the model's Engrams look them up.
    #[wasm_bindgen(unchecked_return_type = "Promise<Array<Ngrams>>")]
    pub fn ngrams(&self, #[wasm_bindgen(unchecked_param_type = "number")] position: JsValue) -> Promise {
        let turn = self.turn();
        promise(async move {
            let session = turn.await?;
            let ngrams = session.state()?.ngrams(whole("position", &position)?)?;
            let told = ngrams.iter().map(|ngrams| json!({ "layer": ngrams.layer, "rows": ngrams.rows }));
            Ok(to_js(&told.collect()))
        })
    }
}

fn layer(layer: &LayerAttention) -> Value {
    let range = |range: &Range<usize>| json!([range.start, range.end]);
    let mut told = json!({ "window": range(&layer.window), "ratio": layer.ratio });
    if let Some(candidates) = &layer.candidates {
        told["candidates"] = candidates.iter().map(range).collect();
    }
    told
}
