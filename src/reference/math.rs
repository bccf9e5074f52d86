//! Small vector operations that every twin uses. All in f32 unless a line says otherwise.

/// A row-major matrix: a weight `[out, in]`, or activations `[rows in flight, channels]`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Matrix {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Values, row after row.
    pub data: Vec<f32>,
}

impl Matrix {
    /// A matrix of `rows` rows over `data`.
    ///
    /// # Panics
    /// When `data` does not have `rows * cols` values.
    pub fn new(rows: usize, cols: usize, data: Vec<f32>) -> Self {
        assert_eq!(data.len(), rows * cols, "a {rows} x {cols} matrix");
        Self { rows, cols, data }
    }
    /// Stacks rows of `cols` values each.
    pub fn stack(cols: usize, rows: impl IntoIterator<Item = Vec<f32>>) -> Self {
        let data: Vec<f32> = rows.into_iter().flatten().collect();
        Self::new(data.len().checked_div(cols).unwrap_or(0), cols, data)
    }
    /// Row `i`.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.cols..][..self.cols]
    }
    /// Row `i`, writable.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.cols..][..self.cols]
    }
    /// All rows in order.
    pub fn iter(&self) -> impl Iterator<Item = &[f32]> {
        (0..self.rows).map(|i| self.row(i))
    }
    /// `W x`: one value a row of the matrix.
    pub fn matvec(&self, x: &[f32]) -> Vec<f32> {
        debug_assert_eq!(x.len(), self.cols);
        self.iter().map(|row| dot(row, x)).collect()
    }
    /// `X Wᵀ`: every row of `x` through the weight. A row's result does not depend on the other rows.
    pub fn apply(&self, x: &Matrix) -> Matrix {
        debug_assert_eq!(x.cols, self.cols);
        let mut y = Matrix::new(x.rows, self.rows, vec![0.0; x.rows * self.rows]);
        // Weight rows outside, so that each is read from memory once for all rows in flight.
        for (o, row) in self.iter().enumerate() {
            for t in 0..x.rows {
                y.data[t * self.rows + o] = dot(row, x.row(t));
            }
        }
        y
    }
    /// A matrix of the same height with `f` of every row.
    pub fn map_rows(&self, cols: usize, mut f: impl FnMut(usize, &[f32]) -> Vec<f32>) -> Matrix {
        Matrix::stack(cols, self.iter().enumerate().map(|(t, row)| f(t, row)))
    }
}

/// `Σ a b`, in sixteen interleaved sums that a compiler turns into vector registers.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a16, b16) = (a.chunks_exact(16), b.chunks_exact(16));
    let tail: f32 = a16.remainder().iter().zip(b16.remainder()).map(|(x, y)| x * y).sum();
    let mut sums = [0f32; 16];
    for (x, y) in a16.zip(b16) {
        for ((s, x), y) in sums.iter_mut().zip(x).zip(y) {
            *s += x * y;
        }
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0] + tail
}

/// `1 / sqrt(mean x² + eps)`: the scalar of an RMS norm (`numerics.md` §3).
pub fn rms_factor(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// RMS norm: `w (x / sqrt(mean x² + eps))` (`numerics.md` §3).
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
    let factor = rms_factor(x, eps);
    x.iter().zip(w).map(|(x, w)| w * (x * factor)).collect()
}

/// `1 / (1 + e^-x)`, in f64 inside.
pub fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + (-x as f64).exp())) as f32
}

/// `x sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `log(1 + e^x)`, in f64 inside.
pub fn softplus(x: f32) -> f32 {
    let x = x as f64;
    (x.max(0.0) + (-x.abs()).exp().ln_1p()) as f32
}

/// `y += x`.
pub fn add(y: &mut [f32], x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
}

/// Whether a value is NaN or infinite, by its bits.
pub fn is_non_finite(x: f32) -> bool {
    x.to_bits() & 0x7f80_0000 == 0x7f80_0000
}
