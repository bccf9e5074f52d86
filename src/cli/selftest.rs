//! `cedra selftest`.

use crate::gpu::{DeviceOptions, Gpu};
use crate::selftest::{run, KernelReport};
use anyhow::bail;
use clap::Args;

/// Runs every kernel on the GPU and compares it with its CPU twin: drivers have bugs.
#[derive(Debug, Args)]
pub(super) struct Selftest {
    /// One JSON object instead of text.
    #[arg(long)]
    json: bool,
}

impl Selftest {
    pub fn run(&self) -> anyhow::Result<()> {
        // Of a software device one wants to know it too.
        let gpu = Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() })?;
        let report = pollster::block_on(run(&gpu))?;
        if self.json {
            println!("{}", serde_json::to_string(&report)?);
        } else {
            println!("{}", report.adapter);
            report.kernels.iter().for_each(|kernel| println!("{}", line(kernel)));
            println!("{} variants of kernels in {:.1} s", report.kernels.len(), report.milliseconds / 1e3);
        }
        let wrong: Vec<_> = report.kernels.iter().filter(|kernel| !kernel.ok).collect();
        if let [first, ..] = wrong[..] {
            let name = format!("{}/{}", first.kernel, first.variant);
            bail!(
                "{} of {} variants of kernels are wrong on this device, first {name}",
                wrong.len(),
                report.kernels.len()
            );
        }
        Ok(())
    }
}

fn line(kernel: &KernelReport) -> String {
    let KernelReport { worst, allowed, message, .. } = kernel;
    let name = format!("{}/{}", kernel.kernel, kernel.variant);
    let found = match (message, *allowed > 0.0) {
        (Some(message), _) => format!("WRONG  {message}"),
        (None, true) => format!("ok     error {worst:.1e}, allowed {allowed:.1e}"),
        (None, false) => "ok     exact".into(),
    };
    format!("{name:24} {found}")
}
