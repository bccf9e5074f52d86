//! Checkpoints whose files are elsewhere: what is read of them, what is refused and when, and that it is the same model.

#[path = "kernels/common.rs"]
mod device;
mod support;

use cedra::checkpoint::{Checkpoint, Fingerprint, Source};
use cedra::gpu::{DeviceOptions, Gpu};
use cedra::model::{Model, Options, Sequence};
use cedra::sampling::{Request, Sampling};
use cedra::text::{NgramTables, Tokenizer};
use cedra::{Error, Result};
use futures::future::LocalBoxFuture;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use support::fixture;

/// Bytes that come only when they are asked for twice, as those of a file elsewhere do.
struct Slow {
    bytes: Arc<Vec<u8>>,
    reads: Arc<Mutex<Vec<Range<u64>>>>,
    /// Reads that give a byte less, from this one on.
    short_from: usize,
}

impl std::fmt::Debug for Slow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("slow")
    }
}

impl Source for Slow {
    fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read(&self, range: Range<u64>) -> LocalBoxFuture<'_, Result<Vec<u8>>> {
        let mut asked = false;
        Box::pin(futures::future::poll_fn(move |context| {
            if !asked {
                asked = true;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            let mut reads = self.reads.lock().unwrap();
            let short = usize::from(reads.len() >= self.short_from);
            reads.push(range.clone());
            Poll::Ready(Ok(self.bytes[range.start as usize..range.end as usize - short].to_vec()))
        }))
    }
}

/// A folder's files, to be served slowly.
struct Elsewhere {
    config: String,
    files: BTreeMap<String, Arc<Vec<u8>>>,
    reads: Arc<Mutex<Vec<Range<u64>>>>,
    short_from: usize,
}

impl Elsewhere {
    fn golden() -> Self {
        let folder = fixture("golden/ckpt_fp8fp4");
        let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let file = std::fs::read(folder.join("model.safetensors")).unwrap();
        let files = BTreeMap::from([("model.safetensors".to_string(), Arc::new(file))]);
        Self { config, files, reads: Arc::default(), short_from: usize::MAX }
    }

    fn open(&self, index: Option<&str>) -> Result<Checkpoint> {
        pollster::block_on(Checkpoint::from_sources(&self.config, index, |name| {
            let bytes = self.files.get(name).ok_or_else(|| Error::io(name, std::io::ErrorKind::NotFound.into()))?;
            let (bytes, reads) = (bytes.clone(), self.reads.clone());
            Ok(Box::new(Slow { bytes, reads, short_from: self.short_from }))
        }))
    }

    /// What `change` makes of the only file.
    fn changed(mut self, change: impl FnOnce(&mut Vec<u8>)) -> Self {
        change(Arc::make_mut(self.files.get_mut("model.safetensors").unwrap()));
        self
    }

    fn in_memory(&self) -> Result<Checkpoint> {
        let files = self.files.iter().map(|(name, bytes)| (name.clone(), bytes.to_vec())).collect();
        Checkpoint::from_files(&self.config, files)
    }

    /// Where the bytes of a tensor lie in the file.
    fn place(&self, tensor: &str) -> Range<usize> {
        let file = &self.files["model.safetensors"];
        let header = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
        let json: serde_json::Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
        let offset = |i: usize| 8 + header + json[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
        offset(0)..offset(1)
    }
}

#[test]
fn of_a_source_the_header_is_read_and_nothing_else() {
    let elsewhere = Elsewhere::golden();
    let checkpoint = elsewhere.open(None).unwrap();
    let here = elsewhere.in_memory().unwrap();
    assert!(checkpoint.names().eq(here.names()));
    let header = u64::from_le_bytes(*elsewhere.files["model.safetensors"].first_chunk().unwrap());
    assert_eq!(*elsewhere.reads.lock().unwrap(), [0..8, 8..8 + header]);
    for name in checkpoint.names() {
        let (weight, tensor) = (checkpoint.weight(name).unwrap(), here.tensor(name).unwrap());
        assert_eq!((weight.shape, weight.format), (tensor.shape, tensor.format), "{name}");
        let fetched = pollster::block_on(weight.fetch()).unwrap();
        assert_eq!((fetched.tensor().data, fetched.tensor().scales), (tensor.data, tensor.scales), "{name}");
    }
    let refused = checkpoint.tensor("norm.weight").unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
}

#[test]
fn what_memory_refuses_a_source_refuses_with_the_same_words() {
    let same = |elsewhere: Elsewhere, part: &str| {
        let words = elsewhere.open(None).unwrap_err().to_string();
        assert_eq!(words, elsewhere.in_memory().unwrap_err().to_string());
        assert!(words.contains(part), "{words}");
    };
    let golden = Elsewhere::golden;
    same(golden().changed(|file| file.truncate(5)), "5 bytes long");
    same(golden().changed(|file| file.truncate(1000)), "bytes left in the file");
    same(golden().changed(|file| file.truncate(file.len() - 1)), "the file has");
    same(golden().changed(|file| file.push(0)), "1 bytes after the last tensor");
    same(golden().changed(|file| file[8] = b'['), "header is not a JSON object");
    same(golden().changed(|file| file[..8].copy_from_slice(&u64::MAX.to_le_bytes())), "header of 18446744073709551615");
}

#[test]
fn shards_are_those_of_the_index() {
    let mut elsewhere = Elsewhere::golden();
    let names: Vec<String> = elsewhere.in_memory().unwrap().names().map(str::to_string).collect();
    let file = elsewhere.files.remove("model.safetensors").unwrap();
    elsewhere.files.insert("one.safetensors".into(), file);
    let index = |shard: &str| {
        let header = safetensors::SafeTensors::deserialize(&elsewhere.files["one.safetensors"]).unwrap();
        let map: BTreeMap<&str, &str> = header.names().into_iter().map(|name| (name, shard)).collect();
        serde_json::json!({ "weight_map": map }).to_string()
    };
    assert!(elsewhere.open(Some(&index("one.safetensors"))).unwrap().names().eq(&names));
    let missing = elsewhere.open(Some(&index("two.safetensors"))).unwrap_err();
    assert!(matches!(missing, Error::Io { .. }), "{missing}");
    assert!(matches!(elsewhere.open(None).unwrap_err(), Error::Io { .. }));
}

#[test]
fn the_fingerprint_is_that_of_the_bytes_wherever_they_are() {
    let elsewhere = Elsewhere::golden();
    let tokenizer = std::fs::read(fixture("golden/ckpt_fp8fp4/tokenizer.json")).unwrap();
    let slowly = |elsewhere: &Elsewhere| {
        let checkpoint = elsewhere.open(None).unwrap();
        pollster::block_on(Fingerprint::read(&checkpoint, Some(&tokenizer))).unwrap()
    };
    let here = Fingerprint::new(&elsewhere.in_memory().unwrap(), Some(&tokenizer));
    assert_eq!(slowly(&elsewhere), here);
    // Saved sessions carry it: it stays what it is, natively and in a browser.
    assert_eq!(
        format!("{here:?}"),
        "Fingerprint { config: 47573ed674847713a8ea1582188bb16b, weights: 9565b1fa0e73251da5a8a019874e6774, \
         tokenizer: 2d45791d0b844cd4005649e224325b12 }"
    );
    let place = elsewhere.place("norm.weight");
    let other = elsewhere.changed(|file| file[place.start] ^= 1);
    assert_ne!(slowly(&other).weights, here.weights);
}

fn load(checkpoint: &Checkpoint) -> Option<Result<Sequence>> {
    device::gpu()?;
    let gpu = Arc::new(Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() }).unwrap());
    let tokenizer = Tokenizer::open(fixture("golden/ckpt_fp8fp4")).unwrap();
    let tables = NgramTables::new(checkpoint.config(), &tokenizer).unwrap();
    let options = Options { context: 256, chunk: 32, poison: true, ..Options::default() };
    let model = Model::load_blocking(gpu, checkpoint, &tables, &options, &mut |_, _| {});
    Some(model.and_then(|model| Sequence::new(Arc::new(model))))
}

#[test]
fn a_model_from_a_source_is_the_model() {
    let elsewhere = Elsewhere::golden();
    let tokens: Vec<u32> = (0..100u32).map(|i| i.wrapping_mul(2_654_435_761) % 200).collect();
    let made = [elsewhere.open(None).unwrap(), elsewhere.in_memory().unwrap()].map(|checkpoint| {
        let mut sequence = load(&checkpoint)?.unwrap();
        sequence.append(&tokens, &mut |_| {}).unwrap();
        let request = Request { max_tokens: 32, sampling: Sampling::default(), stop_ids: vec![] };
        let made = sequence.generate(&request).unwrap().collect::<Result<Vec<u32>>>().unwrap();
        Some(made)
    });
    let [slow, fast] = made;
    assert_eq!(slow, fast);
    let most = elsewhere.reads.lock().unwrap().iter().map(|read| read.end - read.start).max().unwrap();
    assert!(most <= 8 << 20, "a read of {most} bytes");
}

#[test]
fn damage_in_a_source_is_found_while_it_is_read() {
    let scale = Elsewhere::golden().place("layers.0.attn.wq_a.scale");
    let nan = Elsewhere::golden().changed(|file| file[scale.start + 1] = 255);
    let early = nan.in_memory().unwrap_err().to_string();
    let late = nan.open(None).unwrap();
    let Some(refused) = load(&late) else { return };
    assert_eq!(refused.unwrap_err().to_string(), early);

    let short = Elsewhere { short_from: 4, ..Elsewhere::golden() };
    let refused = load(&short.open(None).unwrap()).unwrap().unwrap_err();
    assert!(matches!(&refused, Error::Io { source, .. } if source.to_string().contains("bytes read of")), "{refused}");
}
