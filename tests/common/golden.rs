//! Recorded intermediates of the independent reference, and how to compare with them (`numerics.md` §19).

use std::collections::BTreeMap;
use std::path::Path;

use cedra::checkpoint::Checkpoint;
use cedra::formats::bf16_to_f32;
use cedra::reference::model::{LogitRows, Model, Options, Rows, State};
use cedra::reference::trace::{Recorded, Trace, Values};
use cedra::text::{NgramLayer, NgramTables};
use safetensors::tensor::{Dtype, SafeTensors};

/// Recorded tensors by `layer_NN.<name>` or `top.<name>`.
#[derive(Debug, Clone, Default)]
pub struct Golden(pub BTreeMap<String, Recorded>);

impl Golden {
    /// All files of a folder; a tensor's scope is the beginning of its file's name.
    pub fn folder(path: &Path) -> Self {
        let mut all = BTreeMap::new();
        let mut files: Vec<_> = std::fs::read_dir(path).unwrap().map(|f| f.unwrap().path()).collect();
        files.sort();
        for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "safetensors")) {
            let scope = file.file_name().unwrap().to_str().unwrap().split('.').next().unwrap();
            all.extend(read(file).into_iter().map(|(name, tensor)| (format!("{scope}.{name}"), tensor)));
        }
        Self(all)
    }
    /// One file whose tensors carry their scopes.
    pub fn file(path: &Path) -> Self {
        Self(read(path))
    }
    pub fn get(&self, layer: usize, name: &str) -> Option<&Recorded> {
        self.0.get(&format!("layer_{layer:02}.{name}"))
    }
    /// Layers of which anything is recorded.
    pub fn layers(&self) -> Vec<usize> {
        let number = |name: &String| name.strip_prefix("layer_").and_then(|n| n[..2].parse().ok());
        let mut layers: Vec<usize> = self.0.keys().filter_map(number).collect();
        layers.dedup();
        layers
    }
}

/// All tensors of a safetensors file; BF16 becomes f32.
pub fn read(path: &Path) -> BTreeMap<String, Recorded> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, t)| {
        let d = t.data();
        let values = match t.dtype() {
            Dtype::F32 => Values::F32(d.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()),
            Dtype::BF16 => {
                let value = |b: &[u8]| bf16_to_f32(u16::from_le_bytes(b.try_into().unwrap()));
                Values::F32(d.chunks_exact(2).map(value).collect())
            }
            Dtype::I32 => Values::I32(d.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()),
            Dtype::I64 => Values::I64(d.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()),
            Dtype::BOOL => Values::Bool(d.iter().map(|&b| b != 0).collect()),
            other => panic!("{name}: {other:?}"),
        };
        (name, Recorded { shape: t.shape().to_vec(), values })
    });
    tensors.collect()
}

pub fn floats(tensor: &Recorded) -> &[f32] {
    match &tensor.values {
        Values::F32(v) => v,
        other => panic!("not floats: {other:?}"),
    }
}

pub fn whole(tensor: &Recorded) -> Vec<i64> {
    match &tensor.values {
        Values::I32(v) => v.iter().map(|&x| x as i64).collect(),
        Values::I64(v) => v.clone(),
        other => panic!("not integers: {other:?}"),
    }
}

/// Tokens and Engram constants of `inputs.safetensors`.
pub fn inputs(path: &Path) -> (Vec<u32>, NgramTables) {
    let file = read(path);
    let ids = |name: &str| -> Vec<u32> { whole(&file[name]).iter().map(|&x| x as u32).collect() };
    let layers = file["engram_primes"].shape[0];
    let part = |name: &str, i: usize| {
        let all = whole(&file[name]);
        let width = all.len() / layers;
        all[i * width..][..width].to_vec()
    };
    let part_u32 = |name: &str, i: usize| part(name, i).into_iter().map(|x| x as u32).collect();
    let layer = |i: usize| NgramLayer {
        multipliers: part("engram_multipliers", i).into_iter().map(|x| x as u64).collect(),
        primes: part_u32("engram_primes", i),
        offsets: part_u32("engram_offsets", i),
    };
    let token_map = ids("engram_token_map");
    let pad = token_map[2];
    (ids("tokens"), NgramTables { token_map, pad, layers: (0..layers).map(layer).collect() })
}

/// A checkpoint folder with the tokens and constants of an `inputs.safetensors`.
pub fn model(checkpoint: &Path, inputs: &Path, cache_quant: bool) -> (Model, Vec<u32>) {
    let (tokens, tables) = self::inputs(inputs);
    let checkpoint = Checkpoint::open(checkpoint).unwrap();
    (Model::load(&checkpoint, &tables, Options { cache_quant, mutation: None }).unwrap(), tokens)
}

/// A forward over all tokens at once, and how far it is from the record.
pub fn end_to_end(model: &Model, tokens: &[u32], golden: &Golden) -> (Errors, Trace) {
    let mut trace = Trace::new();
    model.forward(&mut model.state(), tokens, LogitRows::All, Some(&mut trace)).unwrap();
    (compare(&trace, golden), trace)
}

/// Every layer from recorded inputs, and how far each is from the record.
pub fn layer_by_layer(model: &Model, tokens: &[u32], golden: &Golden) -> (Errors, Trace) {
    let (mut state, mut trace) = (model.state(), Trace::new());
    let mut rows = model.embed(&state, tokens, &mut trace).unwrap();
    for layer in golden.layers() {
        model.layer(layer, &mut state, &mut rows, &mut trace);
        follow(model, golden, layer, &mut state, &mut rows);
    }
    (compare(&trace, golden), trace)
}

/// What is wrong with an end-to-end forward without cache quantisation (`numerics.md` §19): logits beyond 2e-4, anything
/// else beyond 1e-4, any integer.
pub fn faults(errors: &Errors) -> Vec<String> {
    let allowed = |name: &str| if name == "top.logits" { 2e-4 } else { 1e-4 };
    let floats = errors.floats.iter().filter(|(name, &e)| e > allowed(name) || e.is_nan());
    let floats = floats.map(|(name, e)| format!("{name}: off by {e:.1e}"));
    floats.chain(errors.wrong_rows().into_iter().map(|(name, n)| format!("{name}: {n} wrong rows"))).collect()
}

/// How far a forward is from the record.
#[derive(Debug, Clone, Default)]
pub struct Errors {
    /// Largest absolute difference of each float tensor.
    pub floats: BTreeMap<String, f32>,
    /// Rows of each float tensor with a difference above 1e-4, of how many.
    pub far_rows: BTreeMap<String, (usize, usize)>,
    /// Rows that differ of each integer tensor, of how many.
    pub integers: BTreeMap<String, (usize, usize)>,
}

impl Errors {
    /// The largest float difference among tensors whose name (without scope) is wanted, with its tensor.
    pub fn worst(&self, wanted: impl Fn(&str) -> bool) -> (f32, &str) {
        let unscoped = |name: &str| wanted(name.split('.').nth(1).unwrap());
        let errors = self.floats.iter().filter(|(name, _)| unscoped(name)).map(|(name, &e)| (e, name.as_str()));
        errors.fold((0.0, "nothing"), |worst, this| if this.0 > worst.0 || this.0.is_nan() { this } else { worst })
    }
    /// Rows of integer tensors that differ.
    pub fn wrong_rows(&self) -> Vec<(&str, usize)> {
        self.integers
            .iter()
            .filter(|(_, &(wrong, _))| wrong > 0)
            .map(|(name, &(wrong, _))| (name.as_str(), wrong))
            .collect()
    }
}

/// Compares everything that a trace and a record both have. Scores that one side does not compute (invisible entries,
/// entries outside the candidates) are -inf there and count as equal; chosen sets are compared as sets, and expert
/// weights by expert.
pub fn compare(trace: &Trace, golden: &Golden) -> Errors {
    let mut errors = Errors::default();
    for (name, ours) in trace.iter() {
        let Some(theirs) = golden.0.get(name) else { continue };
        // A record may hold fewer rows than were computed.
        let rows = |t: &Recorded| t.shape[usize::from(t.shape[0] == 1)];
        assert_eq!(ours.shape.len(), theirs.shape.len(), "{name}: {:?} and {:?}", ours.shape, theirs.shape);
        assert_eq!(rows(ours), rows(theirs), "{name}: {:?} and {:?}", ours.shape, theirs.shape);
        let width = |len: usize, t: &Recorded| len / rows(t).max(1);
        match (&ours.values, &theirs.values) {
            (Values::F32(a), Values::F32(b)) if name.ends_with("moe_weights") => {
                let ids = |n: &str| n.replace("moe_weights", "moe_indices");
                let (by, k) = (golden.0.get(&ids(name)), width(a.len(), ours));
                let ours = ordered(a, &whole(trace.get(&ids(name)).unwrap()), k);
                let theirs = ordered(b, &whole(by.unwrap()), k);
                errors.floats.insert(name.into(), max_difference(&ours, &theirs));
            }
            (Values::F32(a), Values::F32(b)) => {
                assert_eq!(a.len(), b.len(), "{name}");
                errors.floats.insert(name.into(), max_difference(a, b));
                let width = width(a.len(), ours).max(1);
                let far = a.chunks(width).zip(b.chunks(width)).filter(|(a, b)| max_difference(a, b) > 1e-4).count();
                errors.far_rows.insert(name.into(), (far, rows(ours)));
            }
            (Values::Bool(a), Values::Bool(b)) => {
                errors.integers.insert(name.into(), different_rows(a, b, width(a.len(), ours), width(b.len(), theirs)));
            }
            _ => {
                let sets = |t: &Recorded| {
                    let all = whole(t);
                    let k = width(all.len(), t);
                    let sorted = |row: &[i64]| -> Vec<i64> {
                        let mut row: Vec<i64> = row.iter().copied().filter(|&id| id >= 0).collect();
                        row.sort_unstable();
                        row
                    };
                    match name.ends_with("hash_ids") {
                        true => all.chunks(k.max(1)).map(<[i64]>::to_vec).collect::<Vec<_>>(),
                        false => all.chunks(k.max(1)).map(sorted).collect(),
                    }
                };
                errors.integers.insert(name.into(), different_rows(&sets(ours), &sets(theirs), 1, 1));
            }
        }
    }
    errors
}

/// Weights of each row in ascending order of expert.
fn ordered(weights: &[f32], ids: &[i64], k: usize) -> Vec<f32> {
    let row = |(weights, ids): (&[f32], &[i64])| {
        let mut row: Vec<_> = ids.iter().zip(weights).map(|(&id, &w)| (id, w)).collect();
        row.sort_by_key(|&(id, _)| id);
        row.into_iter().map(|(_, w)| w)
    };
    weights.chunks(k).zip(ids.chunks(k)).flat_map(row).collect()
}

fn different_rows<T: PartialEq>(a: &[T], b: &[T], width_a: usize, width_b: usize) -> (usize, usize) {
    let rows = a.chunks(width_a).zip(b.chunks(width_b));
    (rows.clone().filter(|(a, b)| a != b).count(), rows.count())
}

/// Largest absolute difference; NaN on one side is infinite, -inf on one side counts as equal.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |max: f32, (&a, &b)| match (a, b) {
        _ if a == b || a == f32::NEG_INFINITY || b == f32::NEG_INFINITY => max,
        _ if (a - b).is_nan() => f32::INFINITY,
        _ => max.max((a - b).abs()),
    })
}

/// Cosine of two vectors.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(&a, &b)| a as f64 * b as f64).sum() };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Puts what the record says comes out of `layer` into the state and the rows in flight, so that the next layer starts
/// from recorded data: streams, pre-mix, and what a source publishes.
pub fn follow(model: &Model, golden: &Golden, layer: usize, state: &mut State, rows: &mut Rows) {
    let plan = &model.config.layers[layer];
    let t = rows.streams.rows;
    let put = |name: &str, to: &mut Vec<f32>| {
        if let Some(recorded) = golden.get(layer, name) {
            let len = to.len();
            to.copy_from_slice(&floats(recorded)[..len]);
        }
    };
    put("streams_out", &mut rows.streams.data);
    put("pre_mix_out", &mut rows.pre.data);
    if let Some(global) = &mut state.globals[layer] {
        put("comp_kv", &mut global.entries.data);
        put("index_k", &mut global.keys.data);
    }
    if plan.index_source == Some(layer) {
        if let Some(topk) = golden.get(layer, "topk") {
            rows.selection = chosen(topk);
        }
    }
    if let Some(Recorded { shape, values: Values::Bool(mask) }) = golden.get(layer, "candidates") {
        let (entries, block) = (shape[2], model.config.candidate_block_size);
        let kept = |row: &[bool]| -> Vec<u32> {
            let blocks = row.chunks(block).enumerate().filter(|(_, block)| block.contains(&true));
            blocks.map(|(i, _)| i as u32).collect()
        };
        rows.candidates = mask.chunks(entries).take(t).map(kept).collect();
    }
}

/// The chosen entries of each row, ascending.
pub fn chosen(topk: &Recorded) -> Vec<Vec<u32>> {
    let ids = whole(topk);
    let row = |row: &[i64]| {
        let mut row: Vec<u32> = row.iter().filter(|&&id| id >= 0).map(|&id| id as u32).collect();
        row.sort_unstable();
        row
    };
    let rows = topk.shape[1];
    ids.chunks(ids.len() / rows).map(row).collect()
}
