//! What a state on the CPU holds that matters, as bits.

use cedra::config::Role;
use cedra::reference::math::Matrix;
use cedra::reference::model::{Model, State};
use cedra::reference::replay::Definition;

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// All of a state that later rows can see: position, history, entries, window keys, remainders and what the draft sees, to the bit.
pub fn visible(model: &Model, state: &State) -> Vec<u32> {
    let c = &model.config;
    let mut seen = vec![state.position as u32];
    seen.extend(&state.history);
    for (index, (plan, ring)) in c.layers.iter().zip(&state.rings).enumerate() {
        let floor = if index < c.decoder() { state.floors.encoder } else { state.floors.decoder };
        let lowest = (state.position + 1).saturating_sub(c.sliding_window).max(floor);
        seen.extend((lowest..state.position).flat_map(|s| bits(ring.row(s % ring.rows))));
        if let Some(global) = &state.globals[index] {
            seen.extend(bits(&global.entries.data).into_iter().chain(bits(&global.keys.data)));
            let open = global.entries.rows * plan.ratio;
            seen.extend((open..state.position).flat_map(|s| bits(global.remainder.row(s % global.remainder.rows))));
        }
    }
    if let Some(window) = &state.draft {
        let lowest = state.position.saturating_sub(c.sliding_window).max(window.floor);
        let keys =
            |ring: &Matrix| (lowest..state.position).flat_map(|s| bits(ring.row(s % ring.rows))).collect::<Vec<_>>();
        seen.extend(window.rings.iter().flat_map(keys));
    }
    seen
}

/// The same of the definition.
pub fn defined(model: &Model, definition: &Definition) -> Vec<u32> {
    let mut seen = vec![definition.read() as u32];
    let read = definition.text()[..definition.read()].iter().rev().copied();
    let length = model.config.engram.as_ref().map_or(0, |engram| engram.max_ngram_size - 1);
    seen.extend(read.chain(std::iter::repeat(u32::MAX)).take(length));
    for plan in &model.config.layers {
        seen.extend(definition.window(plan.index).values().flat_map(|key| bits(key)));
        if plan.role == Role::Full {
            let (entries, keys) = definition.entries(plan.index);
            seen.extend(bits(&entries.data).into_iter().chain(bits(&keys.data)));
            let remainder = definition.remainder(plan.index);
            seen.extend(remainder.values().flat_map(|(value, gate)| bits(value).into_iter().chain(bits(gate))));
        }
    }
    let stages = model.weights.draft.as_ref().map_or(0, |draft| draft.stages.len());
    seen.extend(
        (0..stages)
            .flat_map(|stage| definition.draft_window(stage).values().flat_map(|key| bits(key)).collect::<Vec<_>>()),
    );
    seen
}
