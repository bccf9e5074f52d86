//! Checkpoints: what opens, what is refused and with which words.

mod support;

use cedra::checkpoint::{Checkpoint, Format};
use support::shared;

#[test]
fn golden_and_pocket_checkpoints_open() {
    for folder in
        ["golden/ckpt_f32", "golden/ckpt_bf16", "golden/ckpt_fp8fp4", "pocket/export", "pocket/export/quantised"]
    {
        let Some(folder) = shared(folder) else { continue };
        let checkpoint = Checkpoint::open(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let head = checkpoint.tensor("head.weight").unwrap();
        assert_eq!(head.shape, [checkpoint.config().vocab_size, checkpoint.config().hidden_size]);
        assert_eq!(head.to_f32().len(), head.rows() * head.channels());
        println!("{folder:?} {}", checkpoint.names().count());
        let _ = Format::F32;
    }
}
