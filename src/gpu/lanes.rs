//! What the variants with subgroups build on, tried on the device at hand.
//!
//! No standard says which invocations of a workgroup a subgroup has. The variants take subgroups to be full, and lanes to be
//! numbered as invocations are: so it is on every device known, and one that does otherwise is used without subgroups.

use super::buffer::MemoryKind;
use super::device::{locked, Gpu};
use super::pipeline::Binding;
use super::recording::{Recording, Traffic};
use crate::Result;
use std::sync::Arc;

/// The variants of the kernel `lanes`, one for each size of workgroups that kernels with subgroups have.
const VARIANTS: [&str; 2] = ["w128", "w256"];
/// Sizes of subgroups that the kernels are made for.
const SIZES: std::ops::RangeInclusive<u32> = 4..=128;

impl Gpu {
    /// Does without subgroups where they are not as the variants need them, and leaves no trace in the counters.
    pub(super) async fn try_subgroups(&mut self) -> Result<()> {
        let mut good = true;
        for variant in VARIANTS {
            good = good && matches!(self.lanes(variant).await, Ok(None));
        }
        locked(&self.pipelines).clear();
        self.tally = Arc::default();
        self.set_subgroups(good);
        self.check()
    }

    /// Runs a variant of `lanes`: what is wrong with the lanes of this device, if anything is.
    ///
    /// # Errors
    /// Those of a device that refuses the shader, or fails.
    pub(crate) async fn lanes(&self, variant: &str) -> Result<Option<String>> {
        let pipeline = self.pipeline("lanes", variant, &[])?;
        let invocations = pipeline.shader().workgroup_size[0];
        let found = self.buffer(MemoryKind::Scratch, "lanes", u64::from(invocations) * 16)?;
        // A browser answers later whether it takes the shader; only then it runs.
        self.settled(|| self.compile(&pipeline).map(|_| ())).await?;
        let mut recording = Recording::new();
        recording.dispatch(&self.bind(&pipeline, &[Binding::Whole(&found)])?, [1; 3], Traffic::NONE);
        self.submit(recording)?;
        let words: Vec<[u32; 4]> = bytemuck::allocation::pod_collect_to_vec(&self.read(&found).await?);
        Ok(fault(&words, self.features().subgroup_size))
    }
}

/// The first invocation that is not as it should be: (lanes, lane, bits of the lanes across that were reached, who was two
/// lanes away), of each.
fn fault(found: &[[u32; 4]], (least, most): (u32, u32)) -> Option<String> {
    let size = found[0][0];
    if !size.is_power_of_two() || !SIZES.contains(&size) || !(least..=most).contains(&size) {
        return Some(format!("subgroups have {size} lanes, {least} to {most} were promised"));
    }
    let wrong = (0..).zip(found).find(|&(local, &invocation)| invocation != [size, local % size, size - 1, local ^ 2]);
    wrong.map(|(local, [lanes, lane, across, beside])| {
        format!(
            "invocation {local} is in lane {lane} of {lanes}, reaches the lanes across by {across:#x} and has invocation \
             {beside} two lanes away, in subgroups of {size}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::fault;

    fn lanes(size: u32, number: impl Fn(u32) -> u32) -> Vec<[u32; 4]> {
        (0..256).map(|local| [size, number(local), size - 1, local ^ 2]).collect()
    }

    #[test]
    fn lanes_in_order_are_good_whatever_the_size() {
        for size in [4, 8, 16, 32, 64, 128] {
            assert_eq!(fault(&lanes(size, |local| local % size), (4, 128)), None);
        }
    }

    #[test]
    fn anything_else_is_said() {
        let message = |found: &[[u32; 4]], promised| fault(found, promised).unwrap();
        assert_eq!(message(&lanes(8, |local| local % 8), (16, 32)), "subgroups have 8 lanes, 16 to 32 were promised");
        assert_eq!(message(&lanes(2, |local| local % 2), (1, 2)), "subgroups have 2 lanes, 1 to 2 were promised");
        assert_eq!(
            message(&lanes(12, |local| local % 12), (4, 128)),
            "subgroups have 12 lanes, 4 to 128 were promised"
        );
        // Square subgroups in a workgroup of rows of 16.
        assert_eq!(
            message(&lanes(16, |local| local % 4 + local / 16 % 4 * 4), (16, 16)),
            "invocation 4 is in lane 0 of 16, reaches the lanes across by 0xf and has invocation 6 two lanes away, in \
             subgroups of 16"
        );
        let mut cut = lanes(32, |local| local % 32);
        cut[200][2] = 0xf;
        assert!(
            message(&cut, (32, 32)).starts_with("invocation 200 is in lane 8 of 32, reaches the lanes across by 0xf")
        );
        let mut mixed = lanes(32, |local| local % 32);
        mixed[128][0] = 16;
        assert!(message(&mixed, (16, 32)).starts_with("invocation 128 is in lane 0 of 16"));
    }
}
