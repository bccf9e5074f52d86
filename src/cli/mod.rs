//! The `cedra` binary: a thin skin over the library.

mod ask;
mod bench;
mod chat;
mod drafts;
mod embedded;
mod generate;
pub mod inspect;
mod interrupt;
mod progress;
mod restore;
mod runtime;
mod selftest;
mod session;
mod synthetic;
mod talk;
mod trace;

pub use embedded::Embedded;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::process::ExitCode;

/// A runtime for language models of the DeepSeek-V4.1 family.
#[derive(Debug, Parser)]
#[command(name = "cedra", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Ask(ask::Ask),
    Chat(chat::Chat),
    /// Generates text from a prompt.
    Generate(generate::Generate),
    Session(session::SessionCommand),
    /// Writes every intermediate of one forward to a safetensors file.
    Trace(trace::Trace),
    Inspect(inspect::Inspect),
    /// Measures prefill and decode, and counts what they read.
    Bench(bench::Bench),
    Selftest(selftest::Selftest),
}

/// Where the model comes from and where it runs.
#[derive(Debug, Clone, Args)]
struct ModelArgs {
    /// Folder with config.json, safetensors files and tokenizer.json.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// What runs the model: `auto` takes a GPU where there is one, else the CPU.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// Prints what was chosen: adapter, its features and limits.
    #[arg(short, long)]
    verbose: bool,
}

/// What runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// A GPU where there is one, else the CPU.
    Auto,
    /// A GPU, software ones included; an error where there is none.
    Gpu,
    /// Plain loops on one core.
    Cpu,
}

/// The command line's definition, for tests and shell completion.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command line. `embedded` is the model that answers where a command may go without one and none is named.
pub fn main(embedded: Option<Embedded>) -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let result = match Cli::parse().command {
        Command::Ask(command) => command.run(embedded),
        Command::Chat(command) => command.run(embedded),
        Command::Generate(command) => command.run(),
        Command::Session(command) => command.run(),
        Command::Trace(command) => command.run(),
        Command::Inspect(command) => command.run(),
        Command::Bench(command) => command.run(),
        Command::Selftest(command) => command.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that went away (`cedra … | head`) is no failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cedra: {}", message(&error));
            error.downcast_ref::<interrupt::Interrupted>().map_or(ExitCode::FAILURE, |stopped| stopped.code.into())
        }
    }
}

/// What went wrong, and why, in one line. A cause that its effect quotes is not said twice.
fn message(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.ends_with(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Ids from a comma-separated list; white space is allowed around them.
fn parse_ids(text: &str) -> anyhow::Result<Vec<u32>> {
    text.split([',', '\n', ' '])
        .map(str::trim)
        .filter(|piece| !piece.is_empty())
        .map(|piece| {
            piece
                .parse()
                .map_err(|_| anyhow::anyhow!("token id `{piece}`: allowed are whole numbers from 0 to {}", u32::MAX))
        })
        .collect()
}
