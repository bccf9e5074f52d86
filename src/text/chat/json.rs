//! JSON that keeps the order of its keys, and is written as the family's prompts write it.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A JSON value. A key that comes twice keeps its first place and its last value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Number(serde_json::Number),
    String(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Self::Object(fields) => fields.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// As Python's `json.dumps` writes it, with `ensure_ascii` off: a space after commas and colons.
    pub fn write(&self, out: &mut String) {
        let list = |out: &mut String, ends: [char; 2], items: &mut dyn Iterator<Item = (Option<&String>, &Json)>| {
            out.push(ends[0]);
            for (i, (key, value)) in items.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                if let Some(key) = key {
                    out.push_str(&quoted(key));
                    out.push_str(": ");
                }
                value.write(out);
            }
            out.push(ends[1]);
        };
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Self::Number(number) => out.push_str(&written(number)),
            Self::String(text) => out.push_str(&quoted(text)),
            Self::Array(items) => list(out, ['[', ']'], &mut items.iter().map(|item| (None, item))),
            Self::Object(fields) => list(out, ['{', '}'], &mut fields.iter().map(|(key, value)| (Some(key), value))),
        }
    }
}

/// In one line, for prompts and messages.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        self.write(&mut text);
        f.write_str(&text)
    }
}

/// A text between quotes, escaped.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Python writes small and large floats with an exponent of two digits or more.
fn written(number: &serde_json::Number) -> String {
    let exponential = number.as_f64().filter(|_| number.is_f64()).map(|value| format!("{value:e}"));
    let parts = exponential.as_deref().and_then(|text| text.split_once('e'));
    match parts.and_then(|(digits, exponent)| Some((digits, exponent.parse::<i32>().ok()?))) {
        Some((digits, exponent)) if !(-4..16).contains(&exponent) => {
            format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
        }
        _ => number.to_string(),
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Values;
        impl<'de> Visitor<'de> for Values {
            type Value = Json;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }
            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
                Ok(Json::Bool(value))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
                Ok(Json::Number(value.into()))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
                Ok(Json::Number(value.into()))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
                Ok(serde_json::Number::from_f64(value).map_or(Json::Null, Json::Number))
            }
            fn visit_str<E>(self, value: &str) -> Result<Json, E> {
                Ok(Json::String(value.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Json::Array(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
                let mut fields: Vec<(String, Json)> = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, Json>()? {
                    match fields.iter_mut().find(|(name, _)| *name == key) {
                        Some(field) => field.1 = value,
                        None => fields.push((key, value)),
                    }
                }
                Ok(Json::Object(fields))
            }
        }
        deserializer.deserialize_any(Values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_stays_and_numbers_are_written_as_python_does() {
        let text = r#"{"z":1,"a":[0.00001,1e-7,2.50,1e16,-3e22,12345678.5,-0.5,10],"ü\n\"":null,"z":true}"#;
        let json: Json = serde_json::from_str(text).unwrap();
        let written =
            "{\"z\": true, \"a\": [1e-05, 1e-07, 2.5, 1e+16, -3e+22, 12345678.5, -0.5, 10], \"ü\\n\\\"\": null}";
        assert_eq!(json.to_string(), written);
    }
}
