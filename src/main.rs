//! The `cedra` binary; everything is in [`cedra::cli`].

fn main() -> std::process::ExitCode {
    cedra::cli::main()
}
